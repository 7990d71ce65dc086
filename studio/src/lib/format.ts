/** A token as a person reads it: spaces and line ends are shown. */
export function shown(text: string): string {
  if (text === '') return '⋯'
  return text.replace(/\n/g, '⏎').replace(/\t/g, '⇥').replace(/^ +| +$/g, (s) => '·'.repeat(s.length))
}

/** The same for running text: one space at its beginning stays a space. */
export function flowing(text: string): string {
  return text === '' ? '' : text.replace(/\n/g, '⏎')
}

export function weight(x: number): string {
  return x === 0 ? '0' : Math.abs(x) < 0.001 ? x.toExponential(0) : x.toFixed(3)
}

export function nats(x: number): string {
  return x < 0.005 ? (x > 0 ? '<0.01' : '0') : x < 10 ? x.toFixed(2) : x.toFixed(1)
}

export function bytes(n: number): string {
  return n < 1000 ? `${n} B` : n < 1e6 ? `${(n / 1000).toFixed(0)} KB` : `${(n / 1e6).toFixed(1)} MB`
}

export function when(stamp: string | number | null | undefined, language: string): string {
  if (stamp === null || stamp === undefined || stamp === '') return ''
  const date = typeof stamp === 'number' ? new Date(stamp * 1000) : new Date(stamp)
  return Number.isNaN(date.getTime()) ? String(stamp) : date.toLocaleString(language, { dateStyle: 'medium', timeStyle: 'short' })
}
