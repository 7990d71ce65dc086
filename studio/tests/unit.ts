/** What the page computes by itself, tried without a page. */
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { colour, ink, level } from '../src/lib/colour.ts'
import { flowing, nats, shown } from '../src/lib/format.ts'
import { en, ja, type Word } from '../src/lib/i18n.ts'
import { unpack } from '../src/lib/packed.ts'

test('both languages have the same words, and none is empty', () => {
  assert.deepEqual(Object.keys(ja), Object.keys(en))
  for (const words of [en, ja]) for (const [name, text] of Object.entries(words)) assert.ok(text.trim(), name)
})

test('both languages fill in the same values', () => {
  const values = (text: string) => [...text.matchAll(/\{(\w+)\}/g)].map((m) => m[1]).sort()
  for (const name of Object.keys(en) as Word[]) assert.deepEqual(values(ja[name]), values(en[name]), name)
})

test('Japanese is Japanese but for names and numbers', () => {
  const same = (Object.keys(en) as Word[]).filter((name) => ja[name] === en[name])
  assert.deepEqual(same, [])
})

test('packed rows come back with their columns, signs and refusals', () => {
  const bytes = new Uint8Array([2, 0, 1, 0, 3, 0, 255, 51, 0, 128])
  const [first, second] = unpack(bytes, 4, 2, false)
  assert.deepEqual([...first!.weights].map((x) => Math.round(x * 100) / 100), [0, 2, 0, 0.4])
  assert.equal(first!.accepted, true)
  assert.deepEqual([...second!.weights], [0, 0, 0, 0])
  assert.equal(second!.accepted, false)
  const [signed] = unpack(new Uint8Array([1, 0, 0, 0, 129]), 1, 1, true)
  assert.equal(signed!.weights[0], -1)
})

test('the map runs from dark to bright, and its ink can be read', () => {
  assert.equal(level(0), 0)
  assert.equal(level(1), 255)
  assert.equal(level(0.25), 128)
  assert.equal(level(7, 7), 255)
  assert.equal(ink(0), '#fff')
  assert.equal(ink(1), '#000')
  assert.match(colour(0.5), /^rgb\(\d+ \d+ \d+\)$/)
})

test('tokens are shown with what cannot be seen', () => {
  assert.equal(shown(' cat'), '·cat')
  assert.equal(shown('\n'), '⏎')
  assert.equal(shown(''), '⋯')
  assert.equal(flowing(' a\n'), ' a⏎')
  assert.equal(nats(0.001), '<0.01')
})
