/** Where the page is: `#/attention?text=…&layer=3`. Everything that a view shows is in its address, so that a link shows it again. */
export const VIEWS = ['chat', 'attention', 'mechanisms', 'identity', 'studies'] as const
export type View = (typeof VIEWS)[number]

export function parse(hash: string): { view: View; query: URLSearchParams } {
  const [path = '', query = ''] = hash.replace(/^#\/?/, '').split(/\?(.*)/s)
  return { view: (VIEWS as readonly string[]).includes(path) ? (path as View) : 'chat', query: new URLSearchParams(query) }
}

class Route {
  view = $state<View>('chat')
  query = $state.raw(new URLSearchParams())
  /** Counts addresses that somebody else set: a link, the back button. */
  visits = $state(0)

  begin(): void {
    const read = () => {
      const { view, query } = parse(location.hash)
      this.view = view
      this.query = query
      this.visits++
    }
    addEventListener('hashchange', read)
    read()
  }

  /** The address that shows what is shown now; no new step for the back button. */
  keep(view: View, values: Record<string, string | number | boolean | readonly string[] | null | undefined>): void {
    if (view !== this.view) return
    const query = new URLSearchParams()
    for (const [name, value] of Object.entries(values)) {
      if (Array.isArray(value)) for (const one of value) query.append(name, String(one))
      else if (value !== null && value !== undefined && value !== '' && value !== false) query.set(name, String(value))
    }
    const text = query.toString()
    history.replaceState(null, '', `#/${view}${text ? `?${text}` : ''}`)
  }
}

export const route = new Route()

export function whole(query: URLSearchParams, name: string, otherwise: number): number {
  const value = Number.parseInt(query.get(name) ?? '', 10)
  return Number.isFinite(value) ? value : otherwise
}
