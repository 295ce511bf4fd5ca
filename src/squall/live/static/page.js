// Listens to the run, and shows it.

import { Charts } from './charts.js'
import { Run } from './model.js'
import { clock, colors, forgetColors, KINDS, percent, Timeline } from './timeline.js'

const at = id => document.getElementById(id)
const number = value => value === null || value === undefined ? '–' : Number(value.toPrecision(4)).toLocaleString('en')
const sized = value => value >= 99.95 ? Math.round(value) : value.toFixed(1)
const bytes = value => value >= 1e9 ? `${sized(value / 1e9)} GB` : value >= 1e6 ? `${sized(value / 1e6)} MB` : `${sized(value / 1e3)} kB`
const WEIGHTS = [3, 4, 6, 7, 10, 11] // columns of the table of replicas that are about weights
const TROUBLE = new Set(['lost', 'restarted', 'warning', 'nonfinite', 'diverged', 'error'])

let run = new Run(), wanted = false, away = false
let whole = false // all is there of what the whole run did
const timeline = new Timeline(at('timeline'), at('tip')), charts = new Charts(at('curves'))

function listen() {
  const source = new EventSource('news')
  source.onmessage = event => {
    const message = JSON.parse(event.data)
    if (message.columns) { run = new Run(); whole = false; at('name').textContent = document.title = message.name }
    away = false
    run.take(message)
    draw()
    if (run.over) past()
  }
  source.onerror = () => { away = true; draw() } // it tries again by itself
}

function draw() { // once for all that comes before the next picture
  if (wanted) return
  wanted = true
  requestAnimationFrame(() => {
    wanted = false
    header(); legend(); timeline.draw(run); epochs(); charts.draw(run); replicas(); links(); events()
  })
}

function header() {
  const { state, over } = run
  at('about').textContent = [state.strategy, state.optimizer, plural(state.replicas, 'replica'), plural(state.shards, 'shard')]
    .filter(Boolean).join(' · ')
  const [name, done, total] = run.limit()
  at('done').firstElementChild.style.width = over && state.status === 'finished' ? '100%' : total ? `${100 * done / total}%` : '0'
  const left = done > 0 && done < total && !over ? `, ${clock(run.time * (total - done) / done)} left` : ''
  const amount = value => Number(value.toFixed(1)).toLocaleString('en')
  const far = name === 'second' ? '' : `${name} ${amount(done)}${total ? ` of ${amount(total)}` : ''}, `
  const all = name === 'second' ? ` of ${clock(total)}` : ''
  const ended = over ? `${state.status} after ${clock(run.time)}${state.reason ? ': ' + state.reason : ''}` : far + clock(run.time) + all + left
  at('status').textContent = away && !over ? `no connection: the command that serves this page has ended` : ended
  at('status').className = (away && !over) || (over && state.status !== 'finished') ? 'alert' : ''
  const recent = run.recent(), metrics = Object.entries(run.curves).filter(([key]) => key.startsWith('validation '))
  cards([
    ...metrics.map(([key, curve]) => [key.slice(11), number(curve.last), 'last validation']),
    run.trains && ['training loss', number(recent.loss), 'last 10 s'],
    ['examples/s', number(recent.rate), `${run.examples.toLocaleString('en')} in all`],
    run.trains && ['staleness', number(recent.stale), `at most ${recent.stalest} lately`],
    ['waiting', recent.waiting === null ? '–' : percent(recent.waiting), 'of replicas’ time'],
    run.trains && ['exchanged', `${bytes(recent.pushed + recent.fetched)}/s`, 'pushed and fetched'],
  ].filter(Boolean))
}

const plural = (count, noun) => Number(count) ? `${count} ${noun}${count === '1' ? '' : 's'}` : ''

function cards(wanted) {
  at('cards').replaceChildren(...wanted.map(([name, value, more]) => {
    const card = document.createElement('div'), figure = document.createElement('b'), small = document.createElement('small')
    figure.textContent = value; small.textContent = more
    card.append(name, figure, small)
    return card
  }))
}

// A strip for each epoch that is under way: what is done, what is dealt, and what is left.
function epochs() {
  const size = run.size, [, trained, back] = run.leases
  at('data').hidden = !run.epochs.length
  at('leases').textContent = `${trained.toLocaleString('en')} examples in leases that have ended, ${back.toLocaleString('en')} given back`
  at('epochs').replaceChildren(...run.epochs.map(([epoch, dealt, done]) => {
    const row = document.createElement('div'), strip = document.createElement('div')
    const piece = (start, stop, kind) => {
      const made = strip.appendChild(document.createElement('i'))
      made.className = kind; made.title = `${start.toLocaleString('en')} to ${stop.toLocaleString('en')}`
      made.style.left = `${100 * start / size}%`; made.style.width = `${100 * (stop - start) / size}%`
    }
    piece(0, dealt, 'dealt')
    for (const [start, stop] of done) piece(start, stop, 'done')
    const count = done.reduce((total, [start, stop]) => total + stop - start, 0)
    const words = document.createElement('span')
    words.textContent = `${Math.floor(100 * count / size)} % done, ${percent((size - dealt) / size)} left`
    row.append(run.trains ? `epoch ${epoch + 1}` : 'examples', strip, words)
    return row
  }))
}

// Bytes by link, as one table for machines and one for replicas and shards.
function links() {
  const shards = run.shardLinks(), machines = run.machineLinks()
  matrix(at('machine-links'), machines, 'from machine', index => `to ${index}`)
  matrix(at('shard-links'), new Set(shards.map(([, shard]) => shard)).size > 1 ? shards : [], 'replica', index => `shard ${index}`)
}

function matrix(box, links, corner, head) {
  box.closest('figure').hidden = !links.length
  if (!links.length) return
  const by = (a, b) => a - b, from = [...new Set(links.map(([row]) => row))].sort(by), to = [...new Set(links.map(([, column]) => column))].sort(by)
  const told = new Map(links.map(([row, column, total, rate]) => [`${row} ${column}`, [total, rate]]))
  const most = Math.max(...links.map(([, , total]) => total)), cells = []
  table(box, [corner, ...to.map(head)], from.map(row => [row, ...to.map(column => {
    const [total, rate] = told.get(`${row} ${column}`) ?? [0, null]
    cells.push(total / most)
    return !total ? '' : rate === null || run.over ? bytes(total) : `${bytes(total)}, ${bytes(rate)}/s`
  })]))
  box.querySelectorAll('td:not(:first-child)').forEach((cell, i) => cell.style.setProperty('--share', `${Math.round(40 * cells[i])}%`))
}

function replicas() {
  at('lately').textContent = run.over ? 'in its last 10 s' : 'over the last 10 s'
  const shown = (_, column) => run.trains || !WEIGHTS.includes(column)
  const fastest = Math.max(0, ...[...run.replicas.values()].map(replica => replica.clock))
  const rows = [...run.replicas].sort(([a], [b]) => a - b).map(([index, replica]) => {
    const recent = run.recent([replica]), place = run.places.get(`replica ${index}`)
    const figures = [index, timeline.states.get(`replica ${index}`)?.text ?? '', number(recent.rate), number(recent.loss), number(recent.stale),
      recent.waiting === null ? '–' : percent(recent.waiting), replica.clock.toLocaleString('en'), fastest - replica.clock,
      percent(replica.examples / Math.max(1, run.examples)), place ? bytes(place.memory) : '–',
      `${bytes(recent.pushed)}/s`, `${bytes(recent.fetched)}/s`]
    return figures.filter(shown)
  })
  const names = ['replica', run.over ? 'on average' : 'now', 'examples/s', 'loss', 'staleness', 'waiting', 'clock', 'behind', 'share',
    'memory', 'pushes', 'fetches']
  table(at('replicas'), names.filter(shown), rows)
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

function legend() { // bubbles are those of parts
  const parts = [...run.places.values()].some(place => place.role === 'part')
  at('legend').replaceChildren(...KINDS.filter(([kind]) => parts || kind !== 'bubble').map(([kind, words]) => {
    const entry = document.createElement('span'), box = document.createElement('i')
    box.style.background = colors()[kind]
    entry.append(box, words)
    return entry
  }))
}

async function choose() {
  timeline.window = Number(at('window').value)
  await past()
  draw()
}

// What the whole run did, where that is wanted and not all is there.
async function past() {
  if (timeline.window !== 0 || whole || away) return
  const { over } = run, answer = await fetch('activity')
  if (!answer.ok) return
  timeline.show((await answer.json()).rows.activity ?? [], run.columns.activity)
  whole = over
  draw()
}

at('window').addEventListener('change', choose)
setInterval(past, 10_000)
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { forgetColors(); charts.forget(); draw() })
addEventListener('resize', draw)
listen()
