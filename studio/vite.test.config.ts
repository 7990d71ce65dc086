import { defineConfig } from 'vite'

// Node 20 runs no TypeScript: the tests are built first, and run by `node --test`.
export default defineConfig({ publicDir: false, build: { ssr: 'tests/unit.ts', outDir: '../build/studio', emptyOutDir: true, target: 'node20' } })
