export interface Row { weights: Float32Array; accepted: boolean }

/** Rows one after the other: count (uint16, the highest bit set where the row was refused), then columns (uint16), then weights (uint8). */
export function unpack(bytes: Uint8Array, keys: number, scale: number, signed: boolean): Row[] {
  const rows: Row[] = []
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength)
  for (let at = 0; at < bytes.length; ) {
    const head = view.getUint16(at, true)
    const count = head & 0x7fff
    const weights = new Float32Array(keys)
    const values = at + 2 + 2 * count
    for (let i = 0; i < count; i++) {
      const value = signed ? view.getInt8(values + i) / 127 : view.getUint8(values + i) / 255
      weights[view.getUint16(at + 2 + 2 * i, true)] = value * scale
    }
    rows.push({ weights, accepted: (head & 0x8000) === 0 })
    at = values + count
  }
  return rows
}
