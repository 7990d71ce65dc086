import { settings } from './settings.svelte.ts'

/** What the server said no to, in its own words. */
export class Refused extends Error {
  constructor(message: string, readonly status: number, readonly code: string | null) {
    super(message)
  }
}

function headers(json: boolean): Record<string, string> {
  const out: Record<string, string> = {}
  if (json) out['content-type'] = 'application/json'
  if (settings.key) out['authorization'] = `Bearer ${settings.key}`
  return out
}

async function refusal(response: Response): Promise<Refused> {
  try {
    const { error } = await response.json()
    return new Refused(String(error.message), response.status, error.code ?? null)
  } catch {
    return new Refused(`${response.status} ${response.statusText}`, response.status, null)
  }
}

async function send(path: string, init: RequestInit): Promise<Response> {
  const response = await fetch(path, { ...init, cache: 'no-store', credentials: 'omit' })
  if (!response.ok) throw await refusal(response)
  return response
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await send(path, { headers: headers(false), signal: signal ?? null })).json()
}

export async function post<T>(path: string, body: unknown, signal?: AbortSignal): Promise<T> {
  return (await send(path, { method: 'POST', headers: headers(true), body: JSON.stringify(body), signal: signal ?? null })).json()
}

export async function remove<T>(path: string): Promise<T> {
  return (await send(path, { method: 'DELETE', headers: headers(false) })).json()
}

export async function blob(path: string): Promise<Blob> {
  return (await send(path, { headers: headers(false) })).blob()
}

/** The objects of an event stream, as they come. */
export async function* events<T>(path: string, body: unknown, signal: AbortSignal): AsyncGenerator<T> {
  const response = await send(path, { method: 'POST', headers: headers(true), body: JSON.stringify(body), signal })
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ''
  for (;;) {
    const { done, value } = await reader.read()
    if (done) return
    rest += value
    const lines = rest.split('\n')
    rest = lines.pop()!
    for (const line of lines) {
      if (!line.startsWith('data:')) continue
      const data = line.slice(5).trim()
      if (data === '[DONE]') return
      const said = JSON.parse(data)
      if (said.error) throw new Refused(String(said.error.message), 200, said.error.code ?? null)
      yield said as T
    }
  }
}

export interface Info {
  id: string
  base: string
  head: string
  created: string | number
  updated: string | number
  experiences: number
  tokens: number
  imprints: number
  episodes: number
  sleeps: number
  bytes: number
}

export async function people(): Promise<Info[]> {
  return (await get<{ data: Info[] }>('/v1/identities')).data
}

export interface ModelInfo { id: string; parent?: string | null }

export async function baseModel(): Promise<string> {
  const { data } = await get<{ data: ModelInfo[] }>('/v1/models')
  return (data.find((m) => !m.parent) ?? data[0])?.id ?? ''
}

export function message(error: unknown): string {
  return error instanceof Error ? error.message : String(error)
}
