import { svelte } from '@sveltejs/vite-plugin-svelte'
import { defineConfig } from 'vite'

// The attention view alone, one script and one sheet: `regard.view` writes both into a file of its own.
export default defineConfig({
  plugins: [svelte()],
  publicDir: false,
  build: {
    outDir: '../src/regard/serve/static/view',
    emptyOutDir: true,
    target: 'es2022',
    lib: { entry: 'src/view.ts', formats: ['iife'], name: 'regardView', fileName: () => 'view.js', cssFileName: 'view' },
  },
})
