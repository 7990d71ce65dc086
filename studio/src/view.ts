import { mount } from 'svelte'
import './app.css'
import { settings } from './lib/settings.svelte.ts'
import type { Packed } from './lib/source.ts'
import FileView from './FileView.svelte'

settings.begin()
const packed: Packed = JSON.parse(document.getElementById('regard-data')!.textContent!)
mount(FileView, { target: document.getElementById('app')!, props: { packed } })
