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

const NS = 'http://www.w3.org/1999/xhtml'
const LEFT_OUT = '[data-no-export], dialog, script'

function copied(node: Node): Node | null {
  if (node.nodeType === Node.TEXT_NODE) return document.createTextNode(node.textContent ?? '')
  if (!(node instanceof Element) || node.matches(LEFT_OUT)) return null
  let copy: Element
  if (node instanceof HTMLCanvasElement) {
    copy = document.createElementNS(NS, 'img')
    copy.setAttribute('src', node.toDataURL())
  } else if (node instanceof HTMLTextAreaElement || node instanceof HTMLInputElement || node instanceof HTMLSelectElement) {
    copy = document.createElementNS(NS, 'div')
    copy.textContent = node instanceof HTMLSelectElement ? (node.selectedOptions[0]?.text ?? '') : node.type === 'checkbox' ? '' : node.value
  } else {
    copy = node.cloneNode(false) as Element
    copy.removeAttribute('class')
    for (const child of node.childNodes) {
      const inner = copied(child)
      if (inner) copy.append(inner)
    }
  }
  const style = getComputedStyle(node)
  let text = ''
  for (const name of style) text += `${name}:${style.getPropertyValue(name)};`
  copy.setAttribute('style', text)
  return copy
}

/** A picture of an element as it stands, drawn by the browser from a copy with all its styles. */
export async function savePng(element: HTMLElement, name: string): Promise<void> {
  const { width, height } = element.getBoundingClientRect()
  const inner = copied(element) as HTMLElement
  inner.setAttribute('xmlns', NS)
  const body = new XMLSerializer().serializeToString(inner)
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
