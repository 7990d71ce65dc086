import { events, message, post } from './api.ts'

export interface MovedToken { text: string; nats: number; by: { words: string; kind: string; source: string; nats: number }[] }
export interface Moved { tokens: MovedToken[]; kept: string[] }
export interface Wish { model: string; prompt: string; remember: boolean; maxTokens: number; temperature: number; seed: number }

interface Chunk { choices: { delta: { content?: string | null }; finish_reason: string | null }[] }

/** One of those who answer a prompt, and what is known of the answer. */
export class Spoken {
  text = $state('')
  busy = $state(false)
  error = $state('')
  moved = $state.raw<Moved | null>(null)
  seconds = $state(0)
  count = $state(0)
  finish = $state('')
  #stop = new AbortController()

  /** The empty name is the model itself. */
  constructor(readonly name: string) {}

  stop(): void {
    this.#stop.abort()
  }

  async speak(wish: Wish): Promise<void> {
    this.busy = true
    const began = performance.now()
    const messages = [{ role: 'user', content: wish.prompt }]
    try {
      const stream = events<Chunk>('/v1/chat/completions', {
        model: wish.model, messages, stream: true, temperature: wish.temperature, seed: wish.seed, max_tokens: wish.maxTokens,
        ...(this.name && { identity: this.name, remember: wish.remember }),
      }, this.#stop.signal)
      // Many tokens a second are drawn a few times a second: the page is for reading.
      let waiting = ''
      let drawn = performance.now()
      for await (const chunk of stream) {
        const choice = chunk.choices[0]
        if (choice?.delta.content) { waiting += choice.delta.content; this.count++ }
        if (choice?.finish_reason) this.finish = choice.finish_reason
        if (performance.now() - drawn > 60) { this.text += waiting; waiting = ''; drawn = performance.now() }
      }
      this.text += waiting
    } catch (error) {
      if (!this.#stop.signal.aborted) this.error = message(error)
    }
    this.seconds = (performance.now() - began) / 1000
    this.busy = false
  }

  /** After all have spoken: what moved each token. */
  async explain(prompt: string): Promise<void> {
    if (!this.name || !this.text.trim() || this.error) return
    try {
      this.moved = await post<Moved>('/v1/attention/moved', {
        identity: this.name, messages: [{ role: 'user', content: prompt }], answer: this.text,
      }, this.#stop.signal)
    } catch (error) {
      if (!this.#stop.signal.aborted) this.error = message(error)
    }
  }
}
