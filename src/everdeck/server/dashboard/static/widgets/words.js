// A command line as a person types it → the words the program gets. Quotes and backslashes as in a POSIX shell;
// nothing is expanded: no variables, no globs, no pipes. Pure.

/** One word as a shell takes it. */
export const quoted = (word) => (/^[A-Za-z0-9_@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);

/** 'python3 "my bot.py"' → {words: ['python3', 'my bot.py'], open: false}; open: a quote was not closed. */
export function split(line) {
  const words = [];
  let word = null;
  let quote = null;
  for (let i = 0; i < line.length; i += 1) {
    const c = line[i];
    if (quote) {
      if (c === quote) quote = null;
      else if (c === '\\' && quote === '"' && '"\\$`'.includes(line[i + 1] ?? '')) word += line[++i];
      else word += c;
    } else if (c === "'" || c === '"') {
      quote = c;
      word ??= '';
    } else if (c === '\\' && i + 1 < line.length) {
      word = (word ?? '') + line[++i];
    } else if (/\s/.test(c)) {
      if (word !== null) words.push(word);
      word = null;
    } else {
      word = (word ?? '') + c;
    }
  }
  if (word !== null) words.push(word);
  return { words, open: quote !== null };
}
