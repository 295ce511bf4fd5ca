// What the page knows of a run. It is fed rows of the record, and keeps as much of a week as of a minute.

const POINTS = 600 // of a curve; of more, each two neighbours become one
const EVENTS = 300
const RECENT_S = 10 // rates and losses are means over so much training time
const SILENT_S = 10 // of who has not reported for so long it is told, or for longer where reports lie further apart
const SPANS_S = 75 // for which spans are kept

export class Curve {
  constructor() { this.x = []; this.y = [] }
  add(x, y) {
    if (y === null || !Number.isFinite(y)) return
    this.x.push(x); this.y.push(y)
    if (this.x.length > POINTS) this.#halve()
  }
  #halve() {
    const keep = (values, merge) => values.filter((_, i) => i % 2).map((value, i) => merge(values[2 * i], value))
    this.x = keep(this.x, (_, later) => later)
    this.y = keep(this.y, (a, b) => (a + b) / 2)
  }
  get last() { return this.y[this.y.length - 1] }
}

class Replica {
  examples = 0; batches = 0; clock = 0; heard = 0; longest = 0; pushed = 0; fetched = 0; stale = new Map(); recent = []; pushes = []
}

const place = node => node.split('.')[0].replace('-', ' ') // "replica-0.1" is in the place "replica 0"

export class Run {
  constructor() {
    this.state = {}; this.time = 0; this.curves = {}; this.replicas = new Map(); this.staleness = new Map()
    this.places = new Map() // place -> { role, index, part, machine, spans, memory, gone }
    this.events = []; this.leases = [0, 0, 0]
    this.epochs = [] // those that are under way: [number, up to where it is dealt, [[start, stop] of what is trained, ...]]
    this.links = [] // what went between machines, as it was told lately: { time_s, bytes: [[from, to, bytes], ...] }
    this.remembered = 0 // up to when memory is in the curves
    this.tick = { x: null, examples: 0, loss: 0, seen: 0, pushed: 0, fetched: 0 }
  }

  take(message) {
    if (message.columns) this.columns = message.columns
    if (message.leases) this.leases = message.leases
    if (message.epochs) this.epochs = message.epochs
    for (const [table, rows] of Object.entries(message.rows)) {
      const names = this.columns[table]
      for (const values of rows) this['on_' + table]?.(Object.fromEntries(names.map((name, i) => [name, values[i]])))
    }
    if (message.rows.state?.some(([key]) => key === 'links')) // now it is known at what time
      this.links.push({ time_s: this.time, bytes: JSON.parse(this.state.links) })
    this.#forget()
  }

  curve(name) { return this.curves[name] ??= new Curve() }

  on_state({ key, value }) { this.state[key] = value }
  on_metric({ time_s, name, value }) { this.curve('validation ' + name).add(time_s, value) }
  on_extra({ time_s, name, value }) { this.curve('extra ' + name).add(time_s, value) }

  on_progress(row) {
    this.#tally(row) // first: it compares clocks that were told by the same time
    const replica = this.#replica(row.replica)
    if (replica.heard) replica.longest = Math.max(replica.longest, row.time_s - replica.heard)
    replica.heard = row.time_s
    replica.examples += row.examples; replica.batches += row.batches
    replica.clock = Math.max(replica.clock, row.clock)
    replica.pushed += row.pushed_bytes; replica.fetched += row.fetched_bytes
    replica.recent.push(row)
    this.time = Math.max(this.time, row.time_s)
  }

  // Rows that replicas report at about the same time make one point of the curves.
  #tally(row) {
    const tick = this.tick
    tick.x ??= row.time_s
    if (row.time_s - tick.x >= 0.5) {
      const seconds = row.time_s - tick.x
      this.curve('examples/s').add(row.time_s, tick.examples / seconds)
      if (tick.seen) this.curve('training loss').add(row.time_s, tick.loss / tick.seen)
      this.curve('pushed').add(row.time_s, tick.pushed / seconds)
      this.curve('fetched').add(row.time_s, tick.fetched / seconds)
      const clocks = [...this.replicas].filter(([index]) => !this.gone(`replica ${index}`)).map(([, replica]) => replica.clock)
      const fastest = Math.max(...clocks)
      if (fastest) {
        this.curve('slowest').add(row.time_s, fastest - Math.min(...clocks))
        this.curve('mean').add(row.time_s, fastest - clocks.reduce((a, b) => a + b, 0) / clocks.length)
      }
      this.tick = { x: row.time_s, examples: 0, loss: 0, seen: 0, pushed: 0, fetched: 0 }
    }
    this.tick.examples += row.examples
    this.tick.pushed += row.pushed_bytes; this.tick.fetched += row.fetched_bytes
    if (row.loss !== null) { this.tick.loss += row.loss * row.examples; this.tick.seen += row.examples }
  }

  on_staleness({ time_s, replica, staleness, count }) {
    this.staleness.set(staleness, (this.staleness.get(staleness) ?? 0) + count)
    this.#replica(replica).pushes.push({ time_s, staleness, count })
  }

  on_activity(row) {
    const name = place(row.node), [role, index] = name.split(' ')
    const found = this.#place(name, { role, index: +index, part: 0 })
    found.machine = row.machine; found.memory = row.memory
    found.spans.push(span(row))
    this.time = Math.max(this.time, row.time_s)
    if (row.time_s > this.remembered) { // a nursery tells of all its processes at once
      if (this.remembered) this.curve('memory').add(this.remembered, sum([...this.places.values()], place => place.memory))
      if (this.remembered) this.curve('largest').add(this.remembered, Math.max(...[...this.places.values()].map(place => place.memory)))
      this.remembered = row.time_s
    }
  }

  on_part(row) {
    const found = this.#place(`replica ${row.replica} part ${row.part}`,
      { role: 'part', index: row.replica, part: row.part })
    found.machine = this.places.get(`replica ${row.replica}`)?.machine ?? 0
    found.memory = row.memory || found.memory
    const seconds = row.compute_s + row.wait_s + row.bubble_s
    found.spans.push({ ...span({ ...row, seconds, awaited: 'other parts', awaited_s: row.wait_s }),
      bubble: row.bubble_s / seconds })
  }

  on_member({ node, time_s, change }) {
    const name = place(node), [role, index] = name.split(' ')
    const found = this.#place(name, { role, index: +index, part: 0 })
    if (change === 'joined') {
      if (found.gone.length && found.gone.at(-1).to === null) found.gone.at(-1).to = time_s
    } else {
      found.gone.push({ from: time_s, to: null, lost: change === 'lost' })
    }
  }

  on_event(event) {
    this.events.push(event)
    if (this.events.length > EVENTS) this.events.shift()
  }

  gone(name) { return this.places.get(name)?.gone.at(-1)?.to === null }

  #replica(index) {
    if (!this.replicas.has(index)) this.replicas.set(index, new Replica())
    return this.replicas.get(index)
  }

  #place(name, kind) {
    if (!this.places.has(name)) this.places.set(name, { name, ...kind, machine: 0, memory: 0, spans: [], gone: [] })
    return this.places.get(name)
  }

  #forget() {
    const drop = (rows, time) => { while (rows.length > 1 && rows[0].time_s <= time) rows.shift() }
    for (const replica of this.replicas.values()) {
      drop(replica.recent, this.time - RECENT_S); drop(replica.pushes, this.time - RECENT_S)
    }
    drop(this.links, this.time - RECENT_S)
    for (const found of this.places.values()) {
      drop(found.spans, this.time - SPANS_S)
      if (found.gone.length > 50) found.gone.shift()
    }
  }

  // ---------------------------------------------------------------- what is shown

  get over() { return Boolean(this.state.status) && this.state.status !== 'running' }
  get size() { return Number(this.state.examples_per_epoch) || 0 }
  get examples() { return sum([...this.replicas.values()], replica => replica.examples) }

  // Whether it moves weights, and does not just answer.
  get trains() { return this.state.optimizer !== '' }

  // Seconds for which a replica has not reported; 0: they are not worth a word.
  silent(index) {
    const replica = this.replicas.get(index), seconds = replica ? this.time - replica.heard : 0
    return !this.over && replica && seconds >= Math.max(SILENT_S, 2 * replica.longest) ? seconds : 0
  }

  // What bounds the run: [its name, how much is done, how much there is, or nothing].
  limit() {
    const epochs = Number(this.state.epochs), steps = Number(this.state.steps), seconds = Number(this.state.seconds)
    const batches = sum([...this.replicas.values()], replica => replica.batches)
    if (!this.trains) return ['example', this.examples + Number(this.state.found ?? 0), this.size]
    if (epochs && this.size) return ['epoch', Math.min(this.examples / this.size, epochs), epochs]
    if (steps) return ['step', Math.min(batches, steps), steps]
    return seconds ? ['second', Math.min(this.time, seconds), seconds] : ['step', batches, null]
  }

  // Between machines, and between replicas and shards: [[from, to, bytes in all, bytes a second lately], ...].
  machineLinks() {
    const [first, last] = [this.links[0], this.links.at(-1)], passed = last ? last.time_s - first.time_s : 0
    const before = new Map(first?.bytes.map(([from, to, sum]) => [`${from} ${to}`, sum]))
    return (last?.bytes ?? []).map(([from, to, sum]) =>
      [from, to, sum, passed ? (sum - (before.get(`${from} ${to}`) ?? 0)) / passed : null])
  }

  // An exchange brings each shard its part of the model, so each has that part of what a replica exchanges.
  shardLinks() {
    const sizes = JSON.parse(this.state.shard_bytes || '[]'), all = sum(sizes, size => size)
    return [...this.replicas].flatMap(([index, replica]) => {
      const recent = this.recent([replica]), total = replica.pushed + replica.fetched, rate = recent.pushed + recent.fetched
      return sizes.map((size, shard) => [index, shard, total * size / all, rate * size / all])
    })
  }

  recent(replicas = [...this.replicas.values()]) {
    const since = this.time - Math.min(this.time, RECENT_S)
    const rows = replicas.flatMap(replica => replica.recent).filter(row => row.time_s > since)
    const known = rows.filter(row => row.loss !== null), seen = sum(known, row => row.examples)
    const pushes = replicas.flatMap(replica => replica.pushes), count = sum(pushes, push => push.count)
    const waited = sum(rows, row => row.wait_s), worked = sum(rows, row => row.compute_s)
    return {
      rate: sum(rows, row => row.examples) / Math.max(1e-9, this.time - since),
      loss: seen ? sum(known, row => row.loss * row.examples) / seen : null,
      stale: count ? sum(pushes, push => push.staleness * push.count) / count : null,
      stalest: pushes.reduce((most, push) => Math.max(most, push.staleness), 0),
      waiting: waited + worked ? waited / (waited + worked) : null,
      pushed: sum(rows, row => row.pushed_bytes) / Math.max(1e-9, this.time - since),
      fetched: sum(rows, row => row.fetched_bytes) / Math.max(1e-9, this.time - since),
    }
  }
}

// Shares of a span of time, and when it was.
export function span(row) {
  const share = seconds => row.seconds ? (seconds ?? 0) / row.seconds : 0
  return {
    time_s: row.time_s, seconds: row.seconds, compute: share(row.compute_s), apply: share(row.apply_s),
    send: share(row.send_s), wait: share(row.wait_s), awaited: row.awaited, waited: share(row.awaited_s), bubble: 0,
  }
}

export const sum = (items, of) => items.reduce((total, item) => total + of(item), 0)
