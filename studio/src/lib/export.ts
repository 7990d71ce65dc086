/** What is shown as a file: JSON of the numbers behind it, or a picture of the page's own elements. */
export function save(data: Blob, name: string): void {
  const url = URL.createObjectURL(data)
  const link = document.createElement('a')
  link.href = url
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(url), 10_000)
}

export function saveJson(data: unknown, name: string): void {
  save(new Blob([JSON.stringify(data, null, 1)], { type: 'application/json' }), `${name}.json`)
}

const LEFT_OUT = '[data-no-export], dialog, script, .hidden'
/** What is seen of an element; all that a browser knows of one would be megabytes. */
const SEEN = [
  'align-items', 'align-self', 'aspect-ratio', 'background-color', 'background-image', 'border-bottom', 'border-collapse', 'border-left', 'border-radius',
  'border-right', 'border-spacing', 'border-top', 'bottom', 'box-shadow', 'box-sizing', 'caption-side', 'color', 'column-gap', 'display', 'fill', 'fill-opacity', 'flex',
  'flex-direction', 'flex-wrap', 'font-family', 'font-size', 'font-style', 'font-variant-numeric', 'font-weight', 'gap', 'grid-column', 'grid-template-columns', 'height',
  'justify-content', 'left', 'letter-spacing', 'line-height', 'list-style-type', 'margin', 'max-height', 'max-width', 'min-height', 'min-width', 'opacity', 'order', 'outline',
  'overflow', 'overflow-wrap', 'padding', 'paint-order', 'position', 'right', 'row-gap', 'stroke', 'stroke-dasharray', 'stroke-opacity', 'stroke-width', 'table-layout',
  'text-align', 'text-anchor', 'text-decoration', 'text-overflow', 'top', 'vertical-align', 'white-space', 'width', 'z-index',
]
const ENTITIES: Record<string, string> = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;' }
// Letters that no XML document may hold are shown as what they are: something that cannot be.
const escaped = (text: string) => text.replace(/[^\t\n\r\u0020-\uD7FF\uE000-\uFFFD\u{10000}-\u{10FFFF}]/gu, '\uFFFD').replace(/[&<>"]/g, (c) => ENTITIES[c]!)

/** An element and all in it as XML, each with the styles that it has now. Written as text: a policy forbids styles on elements of this page. */
function written(node: Node): string {
  if (node.nodeType === Node.TEXT_NODE) return escaped(node.textContent ?? '')
  if (!(node instanceof Element) || node.matches(LEFT_OUT)) return ''
  const style = getComputedStyle(node)
  if (style.display === 'none') return ''
  const look = SEEN.map((name) => `${name}:${style.getPropertyValue(name)}`).join(';')
  let tag = node.localName
  let inside = ''
  let more = ''
  if (node instanceof HTMLCanvasElement) {
    tag = 'img'
    more = ` src="${node.toDataURL()}"`
  } else if (node instanceof HTMLTextAreaElement || node instanceof HTMLInputElement || node instanceof HTMLSelectElement) {
    tag = 'div'
    inside = escaped(node instanceof HTMLSelectElement ? (node.selectedOptions[0]?.text ?? '') : node.type === 'text' || node.type === 'textarea' ? node.value : '')
  } else {
    for (const child of node.childNodes) inside += written(child)
    if (node instanceof HTMLTableCellElement && node.colSpan > 1) more = ` colspan="${node.colSpan}"`
    if (node instanceof HTMLImageElement) more = ` src="${picture(node)}"`
    else if (node instanceof SVGElement) for (const { name, value } of node.attributes) if (!['class', 'style', 'tabindex', 'role'].includes(name) && !name.startsWith('aria-')) more += ` ${name}="${escaped(value)}"`
  }
  const space = node instanceof SVGSVGElement ? ' xmlns="http://www.w3.org/2000/svg"' : ''
  return `<${tag}${space}${more} style="${escaped(look)}">${inside}</${tag}>`
}

/** A picture's own pixels: a picture in a picture may not be fetched. */
function picture(image: HTMLImageElement): string {
  const canvas = document.createElement('canvas')
  canvas.width = image.naturalWidth || 1
  canvas.height = image.naturalHeight || 1
  canvas.getContext('2d')!.drawImage(image, 0, 0)
  return canvas.toDataURL()
}

/** A picture of an element as it stands, drawn by the browser from a copy with all its styles. */
export async function savePng(element: HTMLElement, name: string): Promise<void> {
  const { width, height } = element.getBoundingClientRect()
  const body = `<div xmlns="http://www.w3.org/1999/xhtml">${written(element)}</div>`
  const background = getComputedStyle(document.body).backgroundColor
  const svg = `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}"><foreignObject width="100%" height="100%">${body}</foreignObject></svg>`
  const image = new Image()
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`
  await image.decode()
  const canvas = document.createElement('canvas')
  const sharp = Math.min(2, 8000 / Math.max(width, height))
  canvas.width = Math.round(width * sharp)
  canvas.height = Math.round(height * sharp)
  const draw = canvas.getContext('2d')!
  draw.fillStyle = background
  draw.fillRect(0, 0, canvas.width, canvas.height)
  draw.drawImage(image, 0, 0, canvas.width, canvas.height)
  const picture = await new Promise<Blob | null>((done) => canvas.toBlob(done, 'image/png'))
  if (picture) save(picture, `${name}.png`)
}
