/** Viridis, read off at nine places: even in lightness, and told apart by every kind of colour vision. */
const STOPS: readonly (readonly [number, number, number])[] = [
  [68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37],
]

/** 256 colours of a map, red, green and blue one after the other. */
export const MAP = new Uint8ClampedArray(256 * 3)
for (let i = 0; i < 256; i++) {
  const at = (i / 255) * (STOPS.length - 1)
  const low = Math.min(Math.floor(at), STOPS.length - 2)
  for (let c = 0; c < 3; c++) MAP[i * 3 + c] = STOPS[low]![c]! + (at - low) * (STOPS[low + 1]![c]! - STOPS[low]![c]!)
}

/** Where on the map a weight stands. The root shows small weights; `scale` is the largest weight that is drawn. */
export function level(weight: number, scale = 1): number {
  return Math.round(255 * Math.sqrt(Math.min(1, Math.max(0, Math.abs(weight) / scale))))
}

export function colour(weight: number, scale = 1): string {
  const i = level(weight, scale) * 3
  return `rgb(${MAP[i]} ${MAP[i + 1]} ${MAP[i + 2]})`
}

/** Black or white, whichever is read more easily on this weight's colour. */
export function ink(weight: number, scale = 1): string {
  const i = level(weight, scale) * 3
  const linear = (v: number) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4)
  const luminance = 0.2126 * linear(MAP[i]!) + 0.7152 * linear(MAP[i + 1]!) + 0.0722 * linear(MAP[i + 2]!)
  return (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) ? '#000' : '#fff'
}
