import { mount } from 'svelte'
import './app.css'
import App from './App.svelte'
import { route } from './lib/route.svelte.ts'
import { settings } from './lib/settings.svelte.ts'

settings.begin()
route.begin()
mount(App, { target: document.getElementById('app')! })
