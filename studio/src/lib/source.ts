/** Where weights come from: a server that computes the rows that are asked for, or a file that holds them. */
import { post } from './api.ts'
import { unpack, type Row } from './packed.ts'

export type { Row } from './packed.ts'

export interface Text {
  tokens: string[]
  slots: string[]
  layers: number
  heads: number
  spec: string
  /** Whether a token meets no later one. */
  causal: boolean
}

export interface Scores { previous: number[][]; induction: number[][]; sink: number[][] }

export interface WeightSource {
  /** Layers that can be looked at. */
  readonly layers?: number[]
  /** Rows that one call gives at most, of so many keys. */
  chunk(keys: number): number
  describe(layer: number): Promise<Text>
  rows(layer: number, head: number, from: number, to: number): Promise<Row[]>
  scores(): Promise<Scores>
}

interface Answer extends Omit<Text, 'tokens'> {
  tokens: { id: number; text: string }[]
  rows: { query: number; heads: { head: number; weights: number[]; accepted: boolean }[] }[]
}

export interface Asked { text: string; identity: string; spec: string; everywhere: boolean }

export class ServerSource implements WeightSource {
  #text = new Map<number, Promise<Text>>()

  constructor(readonly asked: Asked) {}

  chunk(keys: number): number {
    return Math.max(1, Math.min(64, Math.floor(200_000 / Math.max(1, keys))))
  }

  #ask(layer: number, more: Record<string, unknown>): Promise<Answer> {
    const { text, identity, spec, everywhere } = this.asked
    return post<Answer>('/v1/attention', { text, layer, ...(identity && { identity }), ...(spec && { spec, everywhere }), ...more })
  }

  describe(layer: number): Promise<Text> {
    let known = this.#text.get(layer)
    if (!known) {
      known = this.#ask(layer, { heads: [0], rows: [0, 0] }).then((a) => ({ ...a, tokens: a.tokens.map((x) => x.text) }))
      this.#text.set(layer, known)
    }
    return known
  }

  async rows(layer: number, head: number, from: number, to: number): Promise<Row[]> {
    const answer = await this.#ask(layer, { heads: [head], rows: [from, to] })
    return answer.rows.map((row) => ({ weights: Float32Array.from(row.heads[0]!.weights), accepted: row.heads[0]!.accepted }))
  }

  async scores(): Promise<Scores> {
    const { text, spec, everywhere } = this.asked
    return (await post<{ scores: Scores }>('/v1/attention/heads', { text, ...(spec && everywhere && { spec }) })).scores
  }
}

/** What `regard.view` writes: each head of each layer packed by itself, opened when it is first looked at. */
export interface Packed {
  title: string
  model: string
  identity: string
  views: {
    spec: string
    tokens: string[]
    slots: string[]
    heads: number
    layers: number
    chosen: number[]
    causal: boolean
    scores: Scores | null
    /** By layer, then head: base64 of zlib. */
    packed: Record<string, { data: string; scale: number; signed: boolean }[]>
  }[]
}

export type PackedView = Packed['views'][number]

async function inflate(base64: string): Promise<Uint8Array> {
  const raw = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0))
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream('deflate'))
  return new Uint8Array(await new Response(stream).arrayBuffer())
}

export class FileSource implements WeightSource {
  readonly layers: number[]
  #open = new Map<string, Promise<Row[]>>()

  constructor(readonly view: PackedView) {
    this.layers = view.chosen
  }

  chunk(): number {
    return 256
  }

  async describe(layer: number): Promise<Text> {
    const { tokens, slots, heads, layers, spec, causal } = this.view
    if (!this.layers.includes(layer)) throw new Error(`layer ${layer}`)
    return { tokens, slots, heads, layers, spec, causal }
  }

  async rows(layer: number, head: number, from: number, to: number): Promise<Row[]> {
    const name = `${layer} ${head}`
    let rows = this.#open.get(name)
    if (!rows) {
      const packed = this.view.packed[layer]![head]!
      rows = inflate(packed.data).then((b) => unpack(b, this.view.slots.length + this.view.tokens.length, packed.scale, packed.signed))
      this.#open.set(name, rows)
      // A few heads at a time: all of them open would be the whole file many times over.
      if (this.#open.size > 12) this.#open.delete(this.#open.keys().next().value!)
    }
    return (await rows).slice(from, to)
  }

  async scores(): Promise<Scores> {
    if (!this.view.scores) throw new Error('this file holds no scores of heads')
    return this.view.scores
  }
}
