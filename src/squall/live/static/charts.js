// Curves, drawn by uPlot, and the pushes by their staleness.

import { clock, colors, STEPS } from './timeline.js'

const HEIGHT = 170
const sized = value => value >= 1e9 ? `${(value / 1e9).toPrecision(3)} G` : value >= 1e6 ? `${(value / 1e6).toPrecision(3)} M`
  : value >= 1e4 ? `${(value / 1e3).toPrecision(3)} k` : Number(value?.toPrecision(4) ?? 0).toLocaleString('en')

class Chart {
  constructor(box, title) {
    this.figure = document.createElement('figure')
    this.figure.innerHTML = `<figcaption></figcaption><div></div>`
    this.figure.querySelector('figcaption').textContent = title
    this.inside = this.figure.querySelector('div')
    box.append(this.figure)
  }

  draw(curves) { // [[name, curve], ...]
    const names = curves.map(([name]) => name).join('|'), width = this.inside.clientWidth
    const data = curves.length === 1 ? [curves[0][1].x, curves[0][1].y]
      : uPlot.join(curves.map(([, curve]) => [curve.x, curve.y]))
    if (names !== this.names) { this.plot?.destroy(); this.plot = null; this.names = names }
    if (!this.plot) this.plot = new uPlot(this.#options(curves.map(([name]) => name), width), data, this.inside)
    else {
      if (width !== this.width) this.plot.setSize({ width, height: HEIGHT })
      this.plot.setData(data)
    }
    this.width = width
  }

  #options(names, width) {
    const { faint, grid, series } = colors()
    const last = (plot, i) => plot.data[i].findLast(value => value !== null && value !== undefined) ?? null
    const told = text => (plot, value, i, at) => text(at === null ? last(plot, i) : value) // the last, where nobody points
    const alone = (plot, i) => plot.data[i].filter(Number.isFinite).length === 1 // a line needs two
    const axis = { stroke: faint, grid: { stroke: grid, width: 0.5 }, ticks: { stroke: grid, width: 0.5 } }
    return {
      width, height: HEIGHT, scales: { x: { time: false } }, cursor: { points: { size: 6 } },
      series: [{ label: 'at', value: told(time => time === null ? '' : clock(time)) },
        ...names.map((label, i) => ({ label, stroke: series[i % 8], width: 1.5, spanGaps: true, dash: i % 2 ? [5, 4] : [],
          points: { show: alone }, value: told(value => value === null ? '' : sized(value)) }))],
      axes: [{ ...axis, size: 32, incrs: STEPS, values: (_, times) => times.map(clock) }, { ...axis, size: 58, values: (_, values) => values.map(sized) }],
    }
  }
}

export class Charts {
  constructor(box) { this.box = box; this.forget() }

  forget() { this.box.replaceChildren(); this.charts = new Map() }

  draw(run) {
    const curves = run.curves, some = (...names) => names.filter(([, key]) => curves[key]?.x.length)
    const extra = Object.keys(curves).filter(name => name.startsWith('extra '))
    this.#draw('Loss', some(['training', 'training loss'], ['validation', 'validation loss'], ['objective', 'validation objective'],
      ...extra.map(name => [name.slice(6), name])), curves)
    for (const name of Object.keys(curves)) {
      const metric = name.startsWith('validation ') ? name.slice(11) : ''
      if (metric && metric !== 'loss' && metric !== 'objective') this.#draw(metric, [[metric, name]], curves)
    }
    this.#draw('Examples a second', some(['examples/s', 'examples/s']), curves)
    if (curves.slowest?.y.some(behind => behind))
      this.#draw('Clocks: exchanges behind the fastest', some(['slowest', 'slowest'], ['mean', 'mean']), curves)
    if (curves.pushed?.y.some(bytes => bytes))
      this.#draw('Bytes a second', some(['pushed', 'pushed'], ['fetched', 'fetched']), curves)
    this.#draw('Memory of the processes, bytes', some(['all', 'memory'], ['largest', 'largest']), curves)
    this.#bars(run.staleness)
  }

  #chart(title) {
    if (!this.charts.has(title)) this.charts.set(title, new Chart(this.box, title))
    return this.charts.get(title)
  }

  #draw(title, wanted, curves) {
    if (wanted.length) this.#chart(title).draw(wanted.map(([name, key]) => [name, curves[key]]))
  }

  #bars(staleness) {
    const most = Math.max(...staleness.keys()), counts = []
    if (!(most > 0)) return
    const width = Math.ceil((most + 1) / 32) // updates of one bar
    for (const [value, count] of staleness) counts[Math.floor(value / width)] = (counts[Math.floor(value / width)] ?? 0) + count
    const chart = this.#chart('Pushes by staleness, in updates'), highest = Math.max(...counts.filter(Boolean))
    chart.inside.className = 'bars'
    const bars = Array.from(counts, (count, i) => {
      const bar = document.createElement('div')
      bar.style.height = `${100 * (count ?? 0) / highest}%`
      bar.title = `${width > 1 ? `${i * width} to ${(i + 1) * width - 1}` : i}: ${(count ?? 0).toLocaleString('en')} pushes`
      return bar
    })
    chart.inside.replaceChildren(...bars)
    const note = chart.figure.querySelector('.note') ?? chart.figure.appendChild(document.createElement('p'))
    note.className = 'note'; note.textContent = `0 to ${most}`
  }
}
