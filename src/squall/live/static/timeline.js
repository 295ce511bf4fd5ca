// The heart of the page: a row for each process, over time, and who waits for whom.

import { span } from './model.js'

export const KINDS = [
  ['compute', 'computing'], ['apply', 'applying'], ['send', 'sending'], ['wait', 'waiting'],
  ['bubble', 'in a bubble'], ['other', 'messages, or rest'], ['dead', 'dead'],
]
const LABEL = 96, TEXT = 280, HEAD = 20
const ORDER = { machine: 0, replica: 1, part: 1, shard: 2, evaluator: 3, coordinator: 4 }
export const STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400, 604800] // seconds
const NOW_S = 2 // what somebody does now is a mean over so much time

export class Timeline {
  constructor(box, tip) {
    this.canvas = box.querySelector('canvas'); this.tip = tip; this.box = box
    this.window = 60; this.past = null // of the whole run: place -> spans
    this.canvas.addEventListener('mousemove', event => this.#hover(event))
    this.canvas.addEventListener('mouseleave', () => { this.tip.hidden = true })
  }

  show(rows, columns) { // the whole run, which the page has asked for
    this.past = new Map()
    for (const values of rows) {
      const row = Object.fromEntries(columns.map((name, i) => [name, values[i]]))
      const name = row.node.split('.')[0].replace('-', ' ')
      if (!this.past.has(name)) this.past.set(name, [])
      this.past.get(name).push(span(row))
    }
  }

  draw(run) {
    this.run = run
    this.rows = rowsOf(run)
    const height = Math.max(4, Math.min(22, Math.floor(680 / Math.max(1, this.rows.length))))
    this.height = height
    const width = this.box.clientWidth, tall = HEAD + this.rows.length * height + 2, scale = devicePixelRatio || 1
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(tall * scale)) {
      this.canvas.width = Math.round(width * scale); this.canvas.height = Math.round(tall * scale)
      this.canvas.style.height = tall + 'px'
    }
    const pen = this.pen = this.canvas.getContext('2d')
    pen.setTransform(scale, 0, 0, scale, 0, 0)
    pen.clearRect(0, 0, width, tall)
    this.wide = width > 760
    this.left = LABEL
    this.arcs = this.wide ? 76 : 36
    this.right = width - this.arcs - (this.wide ? TEXT : 0)
    this.to = run.time
    this.from = this.window ? Math.max(0, run.time - this.window) : 0
    if (!run.over) this.to = Math.max(this.to, Math.min(this.window, 10)) // room to grow into
    this.colors = colors()
    pen.font = '12px system-ui, sans-serif'; pen.textBaseline = 'middle'
    this.states = new Map(this.rows.map(row => [row.name, now(row, run, this.#spans(row), this.from)]))
    if (run.state.strategy === 'all_reduce') blame(this.states)
    this.#axis()
    this.rows.forEach((row, number) => this.#row(row, HEAD + number * height))
    // Of low rows not all have room for words: the last ones do, which are shards.
    for (let number = this.rows.length - 1; number >= 0; number -= Math.ceil(11 / height))
      this.#words(this.rows[number], HEAD + (number + 0.42) * height)
    this.#arcs()
  }

  #x(time) { return this.left + (time - this.from) / Math.max(1e-9, this.to - this.from) * (this.right - this.left) }

  #pixel(time) { return Math.round(this.#x(time) * devicePixelRatio) / devicePixelRatio } // else seams are seen

  #axis() {
    const pen = this.pen, length = this.to - this.from
    const step = STEPS.find(s => length / s <= Math.max(1, (this.right - this.left) / 70)) ?? 604800
    pen.fillStyle = this.colors.faint; pen.textAlign = 'center'
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) {
      if (this.#x(at) > this.left + 12) pen.fillText(clock(at), Math.min(this.#x(at), this.right - 14), HEAD / 2)
    }
    pen.textAlign = 'left'
    if (this.wide) pen.fillText(this.run.over ? 'on average:' : 'now:', this.right + this.arcs, HEAD / 2)
  }

  #spans(row) { return (this.window === 0 && this.past ? this.past.get(row.name) : null) ?? row.spans }

  #row(row, y) {
    const pen = this.pen, h = this.height - (this.height > 8 ? 3 : 1)
    pen.fillStyle = this.colors.other; pen.fillRect(this.left, y, this.right - this.left, h)
    const spans = this.#spans(row), ends = endsOf(spans)
    spans.forEach((one, i) => {
      const began = ends[i] - one.seconds, near = began - (ends[i - 1] ?? -Infinity) < one.seconds / 2
      const x = this.#pixel(Math.max(this.from, near ? ends[i - 1] : began))
      if (ends[i] <= this.from) return
      this.#cell(one, x, y, Math.max(1 / devicePixelRatio, this.#pixel(Math.min(ends[i], this.to)) - x), h)
    })
    for (const gap of row.gone) this.#gap(gap, y, h)
  }

  // What takes part of the time has that part of the height; in low rows the colour of what takes most.
  #cell(one, x, y, width, height) {
    const pen = this.pen, parts = KINDS.slice(0, 5).map(([kind]) => [kind, one[kind]])
    if (height < 6) {
      const rest = 1 - parts.reduce((total, [, share]) => total + share, 0)
      const [kind, share] = parts.reduce((most, part) => part[1] > most[1] ? part : most)
      if (share > rest) { pen.fillStyle = this.colors[kind]; pen.fillRect(x, y, width, height) }
      return
    }
    let bottom = y + height
    for (const [kind, share] of parts) {
      if (share <= 0) continue
      const tall = Math.min(1, share) * height
      pen.fillStyle = this.colors[kind]; pen.fillRect(x, bottom - tall, width, tall)
      bottom -= tall
    }
  }

  #gap(gap, y, h) {
    const from = this.#x(Math.max(gap.from, this.from)), to = this.#x(Math.min(gap.to ?? this.to, this.to))
    if ((gap.to ?? this.to) < this.from || gap.from > this.to) return
    const pen = this.pen
    pen.fillStyle = gap.lost ? this.colors.dead : this.colors.other
    if (gap.lost) pen.fillRect(from, y, Math.max(2, to - from), h)
    else pen.clearRect(from, y, to - from, h)
  }

  #words(row, y) {
    const pen = this.pen, state = this.states.get(row.name)
    pen.textAlign = 'right'; pen.fillStyle = row.role === 'machine' ? this.colors.ink : this.colors.faint
    pen.fillText(row.label, this.left - 8, y)
    if (!this.wide) return
    pen.textAlign = 'left'; pen.fillStyle = state.alert ? this.colors.wait : this.colors.faint
    pen.fillText(state.text, this.right + this.arcs, y, TEXT)
  }

  // From each row that waits to the one that it waits for; the more, the thicker.
  #arcs() {
    const pen = this.pen, at = new Map(this.rows.map((row, number) => [row.name, HEAD + (number + 0.42) * this.height]))
    for (const row of this.rows) {
      const state = this.states.get(row.name)
      if (!at.has(state.awaited) || state.waited < 0.05) continue
      const y = at.get(row.name), to = at.get(state.awaited), x = this.right + 4
      const out = x + 14 + Math.min(this.arcs - 20, 10 + Math.abs(to - y) / 6)
      pen.strokeStyle = pen.fillStyle = this.colors.wait
      pen.globalAlpha = 0.25 + 0.75 * Math.min(1, state.waited); pen.lineWidth = (0.75 + 3 * Math.min(1, state.waited)) * Math.min(1, this.height / 14)
      pen.beginPath(); pen.moveTo(x, y); pen.bezierCurveTo(out, y, out, to, x + 7, to); pen.stroke()
      pen.beginPath(); pen.moveTo(x, to); pen.lineTo(x + 8, to - 4); pen.lineTo(x + 8, to + 4); pen.fill()
    }
    pen.globalAlpha = 1
  }

  #hover(event) {
    const x = event.offsetX, row = this.rows?.[Math.floor((event.offsetY - HEAD) / this.height)]
    this.tip.hidden = !row
    if (!row) return
    const time = this.from + (x - this.left) / (this.right - this.left) * (this.to - this.from)
    const spans = this.#spans(row), ends = endsOf(spans), one = spans.find((_, i) => ends[i] >= time)
    const gap = row.gone.find(each => each.from <= time && (each.to ?? Infinity) > time)
    const lines = one && !gap ? KINDS.slice(0, 5).filter(([kind]) => one[kind] >= 0.005)
      .map(([kind, words]) => `${percent(one[kind])} ${words}`) : [gap ? 'not there' : this.states.get(row.name).text]
    if (one && !gap && one.awaited && one.waited >= 0.005) lines.push(`${percent(one.waited)} for ${called(one.awaited)}`)
    this.tip.textContent = [`${row.label}, ${clock(one ? one.time_s : this.to)}`, ...lines].join('\n')
    this.tip.style.left = Math.min(x + 14, this.box.clientWidth - 190) + 'px'
    this.tip.style.top = event.offsetY + 14 + 'px'
  }
}

// Rows in order; where a run has several machines, one for each of them above its processes.
function rowsOf(run) {
  const rows = [...run.places.values()].map(row => ({ ...row, label: label(row) }))
  const machines = [...new Set(rows.map(row => row.machine))].sort((a, b) => a - b)
  if (machines.length > 1) {
    for (const machine of machines) {
      rows.push({ name: `machine ${machine}`, label: `machine ${machine}`, role: 'machine', index: 0, part: 0, machine,
        gone: [], spans: together(rows.filter(row => row.machine === machine && row.role !== 'part')) })
    }
  }
  const key = row => [row.machine, ORDER[row.role], row.index, row.role === 'part' ? 1 : 0, row.part]
  return rows.sort((a, b) => { const other = key(b); return key(a).map((k, i) => k - other[i]).find(d => d) ?? 0 })
}

const label = row => ({ part: `part ${row.part}`, replica: row.name, shard: row.name })[row.role] ?? row.role

// What the processes of a machine do on average.
function together(rows) {
  const at = new Map()
  for (const one of rows.flatMap(row => row.spans)) {
    const moment = one.time_s.toFixed(3)
    if (!at.has(moment)) at.set(moment, [])
    at.get(moment).push(one)
  }
  return [...at.values()].map(spans => {
    const mean = kind => spans.reduce((total, one) => total + one[kind], 0) / spans.length
    return { ...spans[0], awaited: '', waited: 0, ...Object.fromEntries(KINDS.slice(0, 5).map(([k]) => [k, mean(k)])) }
  }).sort((a, b) => a.time_s - b.time_s)
}

// When each span was over. Reports that have waited somewhere come together, with the time of the last of them.
export function endsOf(spans) {
  const ends = spans.map(one => one.time_s)
  for (let i = ends.length - 1; i > 0; i--) ends[i - 1] = Math.min(ends[i - 1], ends[i] - spans[i].seconds)
  return ends
}

// What a row does now, in words, and for whom it waits; of a run that is over what it did on average, from a moment on.
function now(row, run, known, from) {
  const gap = row.gone.at(-1)
  if (gap && gap.to === null && (gap.lost || !run.over)) return { text: gap.lost ? 'dead' : 'has left', alert: gap.lost, waited: 0 }
  const spans = known.filter(one => one.time_s > (run.over ? from : run.time - NOW_S))
  const seconds = spans.reduce((total, one) => total + one.seconds, 0)
  if (!seconds) return { text: run.over ? '' : 'not heard of', waited: 0 }
  const mean = kind => spans.reduce((total, one) => total + one[kind] * one.seconds, 0) / seconds
  const by = new Map()
  for (const one of spans) if (one.awaited) by.set(one.awaited, (by.get(one.awaited) ?? 0) + one.waited * one.seconds)
  const [awaited, waited_s] = [...by].reduce((most, each) => each[1] > most[1] ? each : most, ['', 0])
  const [kind, words] = KINDS.slice(0, 5).reduce((most, each) => mean(each[0]) > mean(most[0]) ? each : most)
  const silent = row.role === 'replica' ? run.silent(row.index) : 0, before = silent ? `no report for ${clock(silent)}, ` : ''
  const text = before + (mean(kind) < 0.005 ? 'rests' : `${words} ${percent(mean(kind))}`)
  return waitingFor(awaited, waited_s / seconds, { text, kind, waiting: mean('wait'), alert: silent > 0 })
}

function waitingFor(awaited, waited, state) {
  const words = state.kind === 'wait' ? ` for ${called(awaited)}` : `, waiting ${percent(waited)} for ${called(awaited)}`
  return { ...state, awaited, waited, text: state.text + (waited >= 0.05 ? words : '') }
}

// In a sum of all nobody knows for whom it waits, but it is for the last one: who waits least is the last most often.
function blame(states) {
  const waits = [...states].filter(([name, { kind }]) => /^replica \d+$/.test(name) && kind)
  if (!waits.length) return
  const [last, { waiting }] = waits.reduce((least, each) => each[1].waiting < least[1].waiting ? each : least)
  for (const [name, state] of waits)
    if (name !== last) states.set(name, waitingFor(last, state.waiting - waiting, state))
}

let known = null
export function colors() {
  if (known) return known
  const style = getComputedStyle(document.documentElement), named = name => style.getPropertyValue('--' + name).trim()
  const names = ['ink', 'faint', 'grid', 'compute', 'apply', 'send', 'wait', 'bubble', 'other', 'dead']
  known = Object.fromEntries(names.map(name => [name, named(name)]))
  known.series = Array.from({ length: 8 }, (_, i) => named('series-' + i))
  return known
}
export const forgetColors = () => { known = null }

const called = name => name.replace(/^(coordinator|evaluator) .*/, '$1') // there is one of these

export const percent = share => `${Math.round(100 * share)} %`
export function clock(seconds) {
  if (seconds < 60) return `${seconds < 10 && seconds % 1 ? seconds.toFixed(1) : Math.round(seconds)} s`
  const pad = value => String(Math.floor(value)).padStart(2, '0')
  return seconds < 3600 ? `${Math.floor(seconds / 60)}:${pad(seconds % 60)}`
    : `${Math.floor(seconds / 3600)}:${pad(seconds % 3600 / 60)}:${pad(seconds % 60)}`
}
