// A worker's log, live: follow, pause, search, wrap, download. Lines are real text in the document (so they can be
// selected, copied and searched), kept in blocks the browser skips while they are out of sight, at most MOST of them.
import { html, classes, useEffect, useRef, useState } from '../core/html.js';
import { address, api } from '../core/api.js';
import { connection } from '../core/deck.js';
import { absolute, whole } from '../core/format.js';
import { useKeys } from '../core/keys.js';
import { keepStream } from '../core/stream.js';
import { paint, plain } from './ansi.js';
import { Icon } from './icons.js';

const MOST = 10_000;
const BLOCK = 200;
const FIRST = 1000;
const FIRST_OF_EACH = 50;
const COLOURS = [36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91];
const PER_FRAME = 1500;

/** name: whose log; names: several workers' logs together, each line with its name in front. */
export function Log({ name, names = null }) {
  const paper = useRef(null);
  const find = useRef(null);
  const book = useRef(null);
  const [phase, setPhase] = useState('connecting');
  const [following, setFollowing] = useState(true);
  const [waiting, setWaiting] = useState(0);
  const [count, setCount] = useState({ shown: 0, dropped: 0 });
  const [wrap, setWrap] = useState(false);
  const [query, setQuery] = useState('');
  const [only, setOnly] = useState(false);
  const [hits, setHits] = useState({ total: 0, at: -1 });
  const [whole_log, setWholeLog] = useState(null);

  useEffect(() => {
    const pages = new Pages(paper.current, { onCount: setCount, onWaiting: setWaiting, onFollow: setFollowing, onHits: setHits });
    book.current = pages;
    const colours = new Map((names || []).map((each, i) => [each, COLOURS[i % COLOURS.length]]));
    let stream = null;
    const open = () => {
      stream = keepStream({
        address: () => { pages.beginAgain(); return names ? address.logsTogether(names, FIRST_OF_EACH) : address.logStream(name, FIRST); },
        names: ['line', 'lines'],
        onMessage: (message) => {
          const data = JSON.parse(message.data);
          pages.take(data.lines ? data.lines.map(({ worker, text }) => `\x1b[${colours.get(worker)}m${worker}\x1b[0m │ ${text}`) : data.texts ?? [data.text]);
        },
        onState: (state) => stream !== null && setPhase(state.phase),
      });
    };
    const close = () => {
      const ending = stream;
      stream = null;
      ending?.close();
    };
    open();
    // A page that sleeps holds no connection, the log's included.
    const stop = connection.watch(({ phase: now }) => {
      if (now === 'asleep') close();
      else if (stream === null) open();
    });
    return () => {
      stop();
      close();
      pages.close();
    };
  }, [name, names?.join()]);

  useEffect(() => {
    const timer = setTimeout(() => book.current?.search(query), 120);
    setWholeLog(null);
    return () => clearTimeout(timer);
  }, [query]);

  // The browser opens the link itself, without our header; so it gets a ticket at the moment of the click.
  const download = async (e) => {
    e.preventDefault();
    location.assign(await api.downloadAddress(name));
  };
  const searchAll = async () => {
    setWholeLog('asking');
    try {
      setWholeLog((await api.logs(name, { grep: escapeForGrep(query), lines: 500 })).lines);
    } catch (problem) {
      setWholeLog(problem);
    }
  };

  useKeys('Log', {
    '/': ['Search the log', () => find.current?.focus()],
    f: ['Follow or pause', () => book.current?.follow(!following)],
    n: ['Next match', () => book.current?.step(1)],
    N: ['Previous match', () => book.current?.step(-1)],
    w: ['Wrap long lines', () => setWrap(!wrap)],
  });

  return html`
    <section class="panel log-panel" aria-label="Log">
      <header class="panel-head log-head">
        <h2>Log</h2>
        <span class=${classes('log-standing', phase === 'live' && following && 'is-live')} role="status">${phase === 'lost' ? 'reconnecting' : phase === 'connecting' ? 'opening' : following ? 'following' : `paused${waiting ? `, ${whole(waiting)} new` : ''}`}</span>
        <div class="log-tools">
          <label class="search-box is-small"><${Icon} name="search" size=${14} /><span class="unseen">Search the log</span>
            <input type="search" ref=${find} placeholder="Search" value=${query} onInput=${(e) => setQuery(e.target.value)}
              onKeyDown=${(e) => { if (e.key === 'Enter') { e.preventDefault(); book.current?.step(e.shiftKey ? -1 : 1); } }} /></label>
          ${query && html`
            <span class="hit-count num" role="status">${hits.total ? `${hits.at + 1}/${whole(hits.total)}` : 'no match'}</span>
            <button class="icon-button" aria-label="Previous match" onClick=${() => book.current?.step(-1)}><${Icon} name="up" /></button>
            <button class="icon-button" aria-label="Next match" onClick=${() => book.current?.step(1)}><${Icon} name="down" /></button>
            <button class="toggle" aria-pressed=${only ? 'true' : 'false'} onClick=${() => setOnly(!only)}>only matches</button>
            ${!names && html`<button class="toggle" onClick=${searchAll}>whole log</button>`}`}
          <button class="toggle" aria-pressed=${following ? 'true' : 'false'} onClick=${() => book.current?.follow(!following)}><${Icon} name=${following ? 'pause' : 'follow'} size=${14} />${following ? 'Pause' : 'Follow'}</button>
          <button class="icon-button" aria-pressed=${wrap ? 'true' : 'false'} aria-label="Wrap long lines" title="Wrap long lines" onClick=${() => setWrap(!wrap)}><${Icon} name="wrap" /></button>
          ${!names && html`<a class="icon-button" href=${address.logDownload(name)} onClick=${download} download aria-label="Download the log" title="Download the log"><${Icon} name="download" /></a>`}
        </div>
      </header>
      ${whole_log && html`<${WholeLog} found=${whole_log} onClose=${() => setWholeLog(null)} />`}
      <div class=${classes('log-paper', wrap && 'is-wrapped', only && query && 'is-only')} ref=${paper} tabindex="0" role="log" aria-live="off" aria-label="Log of ${names ? names.join(', ') : name}"></div>
      <footer class="log-foot quiet">
        ${count.shown === 0 && phase === 'live' ? 'Nothing has been printed yet.' : `${whole(count.shown)} lines shown`}
        ${count.dropped > 0 && names && ` · ${whole(count.dropped)} older ones left`}${count.dropped > 0 && !names && html` · ${whole(count.dropped)} older ones are in the <a href=${address.logDownload(name)} onClick=${download} download>download</a>`}
      </footer>
    </section>`;
}

function WholeLog({ found, onClose }) {
  const lines = Array.isArray(found) ? found : [];
  return html`
    <div class="whole-log" role="region" aria-label="Matches in the whole log">
      <p><strong>${found === 'asking' ? 'Searching the whole log…' : found instanceof Error ? found.message : lines.length ? `${whole(lines.length)} matching lines, newest last` : 'No line matches.'}</strong>
        <button class="icon-button" aria-label="Close" onClick=${onClose}><${Icon} name="close" size=${14} /></button></p>
      ${lines.length > 0 && html`<pre tabindex="0">${lines.map(plain).join('\n')}</pre>`}
    </div>`;
}

const escapeForGrep = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, '\\$&');

/** The daemon's own note between two runs, as people read it; null for a line of the worker. */
function noteIn(text) {
  const found = text.match(/^--- everdeck (\S+) (\w+) pid=(\d+) ?(.*?) ?---$/);
  if (!found) return null;
  const [, at, what, pid, more] = found;
  const how = more.replace(/cookie=\S+/, '').trim();
  return `${what} · pid ${pid}${how ? ` · ${how}` : ''} · ${absolute(at)}`;
}

/** The lines in the document; knows nothing of where they come from. */
class Pages {
  constructor(paper, hear) {
    this.paper = paper;
    this.hear = hear;
    this.blocks = [];
    this.shown = 0;
    this.dropped = 0;
    this.following = true;
    this.queue = [];
    this.held = [];
    this.frame = 0;
    this.query = '';
    this.hits = [];
    this.at = -1;
    this.scrolledByUs = 0;
    this.top = 0;
    this.onScroll = () => {
      const bottom = paper.scrollHeight - paper.clientHeight - paper.scrollTop;
      // A browser tells of a scroll a frame later, so the last one of ours may be told after the pause: it moves nothing.
      const down = paper.scrollTop > this.top;
      this.top = paper.scrollTop;
      if (this.following && bottom > 60 && performance.now() - this.scrolledByUs > 150) this.follow(false);
      else if (!this.following && down && bottom < 4 && !this.query) this.follow(true);
    };
    paper.addEventListener('scroll', this.onScroll, { passive: true });
  }

  /** A stream that begins anew sends its last lines again: start from an empty paper. */
  beginAgain() {
    this.fresh = true;
  }

  take(lines) {
    if (this.fresh) {
      this.fresh = false;
      this.held = [];
      // Who has paused is reading: the paper stays as it is until following begins again.
      if (this.following) this.clear();
      else this.stale = true;
    }
    const target = this.following ? this.queue : this.held;
    for (const line of lines) target.push(line);
    if (target.length > MOST) this.dropped += target.splice(0, target.length - MOST).length;
    if (!this.following) this.hear.onWaiting(this.held.length);
    else this.soon();
  }

  follow(on) {
    if (on === this.following) return;
    this.following = on;
    this.top = this.paper.scrollTop;
    if (on) {
      if (this.stale) this.clear();
      for (const line of this.held.splice(0)) this.queue.push(line);
      this.hear.onWaiting(0);
      this.soon();
      this.toBottom();
    }
    this.hear.onFollow(on);
  }

  soon() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.write(this.queue.splice(0, PER_FRAME));
      if (this.queue.length) this.soon();
    });
  }

  write(lines) {
    const fragment = document.createDocumentFragment();
    let block = this.blocks.at(-1);
    for (const text of lines) {
      if (!block || block.lines.length >= BLOCK) {
        const element = document.createElement('div');
        element.className = 'log-block';
        block = { element, lines: [] };
        this.blocks.push(block);
        fragment.append(element);
      }
      const element = document.createElement('div');
      element.className = 'log-line';
      const note = noteIn(text);
      if (note) {
        element.classList.add('is-mark');
        element.textContent = note;
      } else paint(element, text);
      if (!element.textContent) element.append('\u200b');
      block.element.append(element);
      const line = { element, text: element.textContent.toLowerCase() };
      block.lines.push(line);
      if (this.query && line.text.includes(this.query)) this.mark(line);
    }
    this.paper.append(fragment);
    this.shown += lines.length;
    while (this.shown > MOST && this.blocks.length > 1) {
      const oldest = this.blocks.shift();
      oldest.element.remove();
      this.shown -= oldest.lines.length;
      this.dropped += oldest.lines.length;
    }
    if (this.following) this.toBottom();
    this.hear.onCount({ shown: this.shown, dropped: this.dropped });
    if (this.query) this.tellHits();
  }

  toBottom() {
    this.scrolledByUs = performance.now();
    this.paper.scrollTop = this.paper.scrollHeight;
    this.top = this.paper.scrollTop;
  }

  clear() {
    for (const { element } of this.blocks) element.remove();
    this.blocks = [];
    this.queue = [];
    this.shown = 0;
    this.dropped = 0;
    this.hits = [];
    this.at = -1;
    this.stale = false;
    CSS.highlights?.clear();
    this.hear.onCount({ shown: 0, dropped: 0 });
  }

  search(query) {
    this.query = query.toLowerCase();
    for (const { element } of this.hits) element.classList.remove('is-hit', 'is-current');
    this.hits = [];
    this.at = -1;
    CSS.highlights?.delete('log-search');
    if (this.query) for (const { lines } of this.blocks) for (const line of lines) if (line.text.includes(this.query)) this.mark(line);
    this.at = this.hits.length - 1;
    this.showHit();
    this.tellHits();
  }

  mark(line) {
    line.element.classList.add('is-hit');
    this.hits.push(line);
    if (!globalThis.Highlight || !CSS.highlights) return; // the whole line is marked all the same
    let marked = CSS.highlights.get('log-search');
    if (!marked) {
      marked = new Highlight();
      CSS.highlights.set('log-search', marked);
    }
    const walker = document.createTreeWalker(line.element, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const text = node.data.toLowerCase();
      for (let i = text.indexOf(this.query); i >= 0; i = text.indexOf(this.query, i + this.query.length)) {
        const range = new Range();
        range.setStart(node, i);
        range.setEnd(node, i + this.query.length);
        marked.add(range);
      }
    }
  }

  step(by) {
    if (!this.hits.length) return;
    this.hits = this.hits.filter(({ element }) => element.isConnected);
    this.hits[this.at]?.element.classList.remove('is-current');
    this.at = (this.at + by + this.hits.length) % this.hits.length;
    this.showHit();
    this.tellHits();
  }

  showHit() {
    const hit = this.hits[this.at];
    if (!hit) return;
    this.follow(false);
    hit.element.classList.add('is-current');
    hit.element.scrollIntoView({ block: 'center', inline: 'nearest' });
  }

  tellHits() {
    this.hear.onHits({ total: this.hits.length, at: this.at });
  }

  close() {
    cancelAnimationFrame(this.frame);
    this.paper.removeEventListener('scroll', this.onScroll);
    this.hear = { onCount() {}, onWaiting() {}, onFollow() {}, onHits() {} };
    this.clear();
  }
}
