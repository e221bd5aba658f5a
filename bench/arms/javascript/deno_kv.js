// Deno KV on a file, as it comes: deno run --unstable-kv deno_kv.js FILE [BATCH]
// Lists are read in batches of 100, unless another size is given.
import { serve } from "./driver.js";

const [path, batch] = Deno.args;
const kv = await Deno.openKv(path);
const options = batch ? { batchSize: Number(batch) } : {};

await serve({
  async fill(pairs) {
    const atomic = kv.atomic();
    for (const [key, value] of pairs) atomic.set(key, value);
    return (await atomic.commit()).ok;
  },
  async get(key) {
    return (await kv.get(key)).value;
  },
  async get_many(keys) {
    return (await kv.getMany(keys)).map((entry) => entry.value);
  },
  async list(group) {
    const found = [];
    for await (const entry of kv.list({ prefix: [group] }, options)) found.push([entry.key, entry.value]);
    return found;
  },
  async set([key, value]) {
    return (await kv.set(key, value)).ok;
  },
  async swap([key, value]) {
    const entry = await kv.get(key);
    return (await kv.atomic().check(entry).set(key, value).commit()).ok;
  },
});
kv.close();
