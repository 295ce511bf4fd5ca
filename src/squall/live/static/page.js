// Listens to the run, and shows it.

import { Charts } from './charts.js'
import { Run, sum } from './model.js'
import { clock, colors, KINDS, now, percent, Timeline } from './timeline.js'

const at = id => document.getElementById(id)
const number = value => value === null || value === undefined ? '–' : Number(value.toPrecision(4)).toLocaleString('en')
const bytes = value => value >= 1e9 ? `${(value / 1e9).toFixed(1)} GB` : value >= 1e6 ? `${(value / 1e6).toFixed(1)} MB`
  : `${Math.round((value ?? 0) / 1e3)} kB`
const COLUMNS = ['replica', 'now', 'examples/s', 'loss', 'staleness', 'waiting', 'clock', 'behind', 'share', 'memory', 'pushes',
  'fetches']
const OF_TRAINING = new Set(['training loss', 'loss', 'staleness', 'exchanged', 'clock', 'behind', 'pushes', 'fetches'])
const told = name => run.trains || !OF_TRAINING.has(name)
const TROUBLE = new Set(['lost', 'warning', 'nonfinite', 'diverged', 'error'])

let run = new Run(), wanted = false, away = false
const timeline = new Timeline(at('timeline'), at('tip')), charts = new Charts(at('charts'))

function listen() {
  const source = new EventSource('news')
  source.onmessage = event => {
    const message = JSON.parse(event.data)
    if (message.columns) { run = new Run(); at('name').textContent = document.title = message.name }
    away = false
    run.take(message)
    draw()
  }
  source.onerror = () => { away = true; draw() } // it tries again by itself
}

function draw() { // once for all that comes before the next picture
  if (wanted) return
  wanted = true
  requestAnimationFrame(() => { wanted = false; header(); timeline.draw(run); charts.draw(run); replicas(); events() })
}

function header() {
  const { state } = run, over = state.status && state.status !== 'running'
  at('about').textContent = [state.strategy, state.optimizer, plural(state.replicas, 'replica'), plural(state.shards, 'shard')]
    .filter(Boolean).join(' · ')
  const [name, done, total] = run.limit()
  at('done').firstElementChild.style.width = over && state.status === 'finished' ? '100%' : done === null ? '0' : `${100 * done / total}%`
  const left = done > 0 && done < total && !over ? `, ${clock(run.time * (total - done) / done)} left` : ''
  const far = done === null ? '' : `${name} ${Number(done.toFixed(1))} of ${total}, `
  const ended = over ? `${state.status}${state.reason ? ': ' + state.reason : ''}` : far + clock(run.time) + left
  at('status').textContent = away && !over ? `no connection: the command that serves this page has ended` : ended
  at('status').className = (away && !over) || (over && state.status !== 'finished') ? 'alert' : ''
  const recent = run.recent(), metrics = Object.entries(run.curves).filter(([key]) => key.startsWith('validation '))
  cards([
    ...metrics.map(([key, curve]) => [key.slice(11), number(curve.last), 'last validation']),
    ['training loss', number(recent.loss), 'last 10 s'],
    ['examples/s', number(recent.rate), `${run.examples.toLocaleString('en')} in all`],
    ['staleness', number(recent.stale), `${recent.stalest} at most lately`],
    ['waiting', recent.waiting === null ? '–' : percent(recent.waiting), 'of the replicas’ time'],
    ['exchanged', `${bytes(recent.pushed + recent.fetched)}/s`, traffic(state.traffic)],
    ['leases ended', run.leases[1].toLocaleString('en'), `examples; ${run.leases[2].toLocaleString('en')} given back`],
  ].filter(([name]) => told(name)))
}

const plural = (count, noun) => Number(count) ? `${count} ${noun}${count === '1' ? '' : 's'}` : ''

function traffic(text) { // machine -> [sent, received]
  const sent = Object.values(JSON.parse(text || '{}'))
  return sent.length ? `${bytes(sum(sent, ([out]) => out))} between machines` : 'pushed and fetched'
}

function cards(wanted) {
  at('cards').replaceChildren(...wanted.map(([name, value, more]) => {
    const card = document.createElement('div'), figure = document.createElement('b'), small = document.createElement('small')
    figure.textContent = value; small.textContent = more
    card.append(name, figure, small)
    return card
  }))
}

function replicas() {
  const fastest = Math.max(0, ...[...run.replicas.values()].map(replica => replica.clock))
  const rows = [...run.replicas].sort(([a], [b]) => a - b).map(([index, replica]) => {
    const recent = run.recent([replica]), place = run.places.get(`replica ${index}`)
    return [index, place ? now(place, run).text : '', number(recent.rate), number(recent.loss), number(recent.stale),
      recent.waiting === null ? '–' : percent(recent.waiting), replica.clock.toLocaleString('en'), fastest - replica.clock,
      percent(replica.examples / Math.max(1, run.examples)), place ? bytes(place.memory) : '–',
      `${bytes(recent.pushed)}/s`, `${bytes(recent.fetched)}/s`]
  })
  table(at('replicas'), COLUMNS.filter(told), rows.map(row => row.filter((_, i) => told(COLUMNS[i]))))
}

function events() {
  const rows = [...run.events].sort((a, b) => b.time_s - a.time_s)
  table(at('events'), [], rows.map(({ time_s, kind, text }) => [clock(time_s), kind, text]),
    rows.map(({ kind }) => TROUBLE.has(kind) ? 'alert' : ''))
}

function table(box, head, rows, kinds = []) {
  const line = (cells, tag, kind = '') => {
    const row = document.createElement('tr')
    row.className = kind
    row.append(...cells.map(cell => { const made = document.createElement(tag); made.textContent = cell; return made }))
    return row
  }
  box.replaceChildren(...(head.length ? [line(head, 'th')] : []), ...rows.map((cells, i) => line(cells, 'td', kinds[i])))
}

function legend() {
  at('legend').replaceChildren(...KINDS.map(([kind, words]) => {
    const entry = document.createElement('span'), box = document.createElement('i')
    box.style.background = colors()[kind]
    entry.append(box, words)
    return entry
  }))
}

async function choose() {
  timeline.window = Number(at('window').value)
  if (timeline.window === 0) {
    const told = await (await fetch('activity')).json()
    timeline.show(told.rows.activity ?? [], run.columns.activity)
  }
  draw()
}

at('window').addEventListener('change', choose)
setInterval(() => { if (timeline.window === 0 && run.state.status === 'running') choose() }, 10_000)
addEventListener('resize', draw)
legend()
listen()
