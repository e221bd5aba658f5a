// A simple key-value table on bun:sqlite, the design that Keyloft's tuple store was first planned with: bun bun_sqlite.js FILE [wal]
// A statement is prepared per call, the prefix is found by LIKE, and nothing is set on the connection unless «wal» is given.
import { Database } from "bun:sqlite";
import { serve } from "./driver.js";

const SEPARATOR = "\x00";
const [path, journal] = process.argv.slice(2);
const db = new Database(path);
if (journal === "wal") db.exec("PRAGMA journal_mode = WAL");
db.exec("CREATE TABLE kv (key TEXT PRIMARY KEY, value TEXT NOT NULL, expires_at INTEGER)");
db.exec("CREATE INDEX idx_kv_expires ON kv(expires_at) WHERE expires_at IS NOT NULL");

function serializeKey(key) {
  return key
    .map((part) => {
      const text = String(part);
      if (text.includes(SEPARATOR)) throw new Error(`Key part cannot contain separator: ${text}`);
      return text;
    })
    .join(SEPARATOR);
}

function get(key) {
  return Promise.resolve().then(() => {
    const statement = db.prepare("SELECT value, expires_at FROM kv WHERE key = ? AND (expires_at IS NULL OR expires_at > ?)");
    const row = statement.get(serializeKey(key), Date.now());
    return row ? { key, value: JSON.parse(row.value) } : { key, value: null };
  });
}

function getMany(keys) {
  return Promise.resolve().then(() => {
    const texts = keys.map(serializeKey);
    const marks = texts.map(() => "?").join(",");
    const statement = db.prepare(
      `SELECT key, value FROM kv WHERE key IN (${marks}) AND (expires_at IS NULL OR expires_at > ?)`,
    );
    const rows = new Map(statement.all(...texts, Date.now()).map((row) => [row.key, JSON.parse(row.value)]));
    return keys.map((key) => ({ key, value: rows.get(serializeKey(key)) ?? null }));
  });
}

function set(key, value) {
  return Promise.resolve().then(() => {
    const statement = db.prepare(
      "INSERT INTO kv (key, value, expires_at) VALUES (?, ?, ?) " +
        "ON CONFLICT(key) DO UPDATE SET value = excluded.value, expires_at = excluded.expires_at",
    );
    statement.run(serializeKey(key), JSON.stringify(value), null);
  });
}

function list(prefix) {
  const statement = db.prepare(
    "SELECT key, value FROM kv WHERE key LIKE ? AND (expires_at IS NULL OR expires_at > ?) ORDER BY key ASC",
  );
  const rows = statement.all(`${serializeKey(prefix)}${SEPARATOR}%`, Date.now());
  let index = 0;
  return {
    async next() {
      if (index >= rows.length) return { done: true, value: undefined };
      const row = rows[index++];
      return { done: false, value: { key: row.key.split(SEPARATOR), value: JSON.parse(row.value) } };
    },
    [Symbol.asyncIterator]() {
      return this;
    },
  };
}

await serve({
  async fill(pairs) {
    db.exec("BEGIN");
    for (const [key, value] of pairs) await set(key, value);
    db.exec("COMMIT");
  },
  async get(key) {
    return (await get(key)).value;
  },
  async get_many(keys) {
    return (await getMany(keys)).map((entry) => entry.value);
  },
  async list(group) {
    const found = [];
    for await (const entry of list([group])) found.push([entry.key, entry.value]);
    return found;
  },
  set: ([key, value]) => set(key, value),
});
db.close();
