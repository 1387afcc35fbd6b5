// What a person can do to workers: which verb fits which state, what it asks first, and what it says afterwards.
import { api, may, roleFor } from '../core/api.js';
import { forget, learn, workers } from '../core/deck.js';
import { isAlive } from '../core/fold.js';
import { plural } from '../core/format.js';
import { ask } from './confirm.js';
import { say } from './toast.js';

export const VERBS = {
  start: { label: 'Start', doing: 'Starting', done: 'started', fits: (s) => !isAlive(s.state) && s.state !== 'backoff' && s.state !== 'failed' },
  stop: { label: 'Stop', doing: 'Stopping', done: 'stopped', fits: (s) => isAlive(s.state) || s.state === 'backoff' },
  restart: { label: 'Restart', doing: 'Restarting', done: 'restarted', fits: (s) => s.state !== 'failed' },
  reset: { label: 'Reset', doing: 'Resetting', done: 'reset', fits: (s) => s.state === 'failed' || s.state === 'backoff' || s.crashes > 0 },
  remove: { label: 'Remove', doing: 'Removing', done: 'removed', fits: () => true },
};

/** Whether our role includes a verb. What it does not is not shown; the daemon would refuse it. */
export const allowed = (verb) => may(roleFor(verb));

/** Do a verb to workers, by name; asks first where it hurts. Returns whether it was done to all of them. */
export async function act(verb, names) {
  const chosen = names.filter((name) => workers.value.has(name));
  if (!chosen.length) return false;
  if (!allowed(verb)) {
    say(`${VERBS[verb].label} needs the role ${roleFor(verb)}`, { tone: 'bad' });
    return false;
  }
  const question = questionFor(verb, chosen);
  if (question && !(await ask(question))) return false;
  return chosen.length === 1 ? actOnOne(verb, chosen[0]) : actOnMany(verb, chosen);
}

function questionFor(verb, names) {
  const one = names.length === 1;
  const whom = one ? names[0] : plural(names.length, 'worker');
  const running = names.filter((name) => isAlive(workers.value.get(name)?.state)).length;
  switch (verb) {
    case 'stop':
      return {
        title: `Stop ${whom}?`, confirm: 'Stop', names,
        text: `${one ? 'It gets' : 'They get'} SIGTERM, and SIGKILL after the grace period. ${one ? 'It stays' : 'They stay'} stopped until started again.`,
      };
    case 'remove':
      return {
        title: `Remove ${whom}?`, confirm: 'Remove', danger: true, names,
        text: `${running ? `${one ? 'It is running and' : `${plural(running, 'of them is', 'of them are')} running and`} will be stopped first. ` : ''}The record is deleted together with its log and its data directory. This cannot be undone.`,
      };
    case 'reset':
      return {
        title: `Reset ${whom}?`, confirm: 'Reset', names,
        text: `${one ? 'Its crashes are' : 'Their crashes are'} forgotten, and ${one ? 'it is' : 'they are'} started if ${one ? 'it' : 'they'} should run.`,
      };
    case 'restart':
      return one ? null : {
        title: `Restart ${whom}?`, confirm: 'Restart', names, text: 'Each is stopped with its whole process tree and started again.',
      };
    default:
      return null;
  }
}

async function actOnOne(verb, name) {
  const words = VERBS[verb];
  try {
    if (verb === 'remove') {
      await api.remove(name);
      forget(name);
    } else {
      learn(await api.act(name, verb));
    }
    say(`${name} ${words.done}`, { undo: verb === 'stop' ? { label: 'Start again', run: () => act('start', [name]) } : null });
    return true;
  } catch (problem) {
    say(`${words.label} ${name}: ${problem.message}`, { tone: 'bad' });
    return false;
  }
}

async function actOnMany(verb, names) {
  const words = VERBS[verb];
  const note = say(`${words.doing} ${plural(names.length, 'worker')}…`, { stays: true });
  try {
    const { results } = await api.bulk(verb, names);
    const failed = results.filter((result) => !result.ok);
    for (const result of results) {
      if (!result.ok) continue;
      if (verb === 'remove') forget(result.name);
      else learn(result.status);
    }
    note.close();
    if (failed.length) {
      const first = failed[0];
      say(`${plural(failed.length, 'worker')} not ${words.done}: ${first.name}: ${first.problem?.detail || first.problem?.title || 'refused'}`, { tone: 'bad' });
    } else {
      say(`${plural(results.length, 'worker')} ${words.done}`);
    }
    return !failed.length;
  } catch (problem) {
    note.close();
    say(`${words.label}: ${problem.message}`, { tone: 'bad' });
    return false;
  }
}
