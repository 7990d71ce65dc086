import { svelte } from '@sveltejs/vite-plugin-svelte'
import { defineConfig } from 'vite'

// The page: plain files with names that never change, so that a rebuild of the same source is the same files.
export default defineConfig({
  base: './',
  plugins: [svelte()],
  build: {
    outDir: '../src/regard/serve/static',
    emptyOutDir: true,
    modulePreload: false,
    target: 'es2022',
    assetsInlineLimit: 0,
    rollupOptions: {
      output: { codeSplitting: false, entryFileNames: 'assets/studio.js', assetFileNames: 'assets/studio[extname]' },
    },
  },
})
