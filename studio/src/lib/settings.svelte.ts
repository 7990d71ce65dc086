import { words, type Language, type Word } from './i18n.ts'

export type Theme = 'system' | 'light' | 'dark'

function stored(name: string): string | null {
  try { return localStorage.getItem(`regard.${name}`) } catch { return null }
}

function store(name: string, value: string): void {
  try { localStorage.setItem(`regard.${name}`, value) } catch { /* a file that was opened may keep nothing */ }
}

function firstLanguage(): Language {
  const kept = stored('language')
  if (kept === 'en' || kept === 'ja') return kept
  return navigator.language.startsWith('ja') ? 'ja' : 'en'
}

function firstKey(): string {
  try { return sessionStorage.getItem('regard.key') ?? '' } catch { return '' }
}

class Settings {
  language = $state<Language>(firstLanguage())
  theme = $state<Theme>((stored('theme') as Theme | null) ?? 'system')
  /** Of this tab alone, and gone with it. */
  key = $state(firstKey())

  setLanguage(language: Language): void {
    this.language = language
    document.documentElement.lang = language
    store('language', language)
  }

  setTheme(theme: Theme): void {
    this.theme = theme
    if (theme === 'system') delete document.documentElement.dataset.theme
    else document.documentElement.dataset.theme = theme
    store('theme', theme)
  }

  setKey(key: string): void {
    this.key = key.trim()
    try {
      if (this.key) sessionStorage.setItem('regard.key', this.key)
      else sessionStorage.removeItem('regard.key')
    } catch { /* then it holds until the page is left */ }
  }

  begin(): void {
    this.setLanguage(this.language)
    this.setTheme(this.theme)
  }
}

export const settings = new Settings()

/** A word of the page in the language that is chosen; {name} is filled in. */
export function t(word: Word, values: Record<string, string | number> = {}): string {
  return words[settings.language][word].replace(/\{(\w+)\}/g, (_, name: string) => String(values[name] ?? ''))
}
