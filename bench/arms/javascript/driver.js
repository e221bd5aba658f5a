// Runs laps of operations that the benchmark sends by lines, and answers with times and results: for Deno and Bun alike.
import { createInterface } from "node:readline";

// One after the other in each of so many concurrent tasks, as bench/harness/race.py does it.
async function timed(call, asks, workers) {
  const answers = new Array(asks.length);
  const seconds = new Array(asks.length);
  let next = 0;
  const work = async () => {
    let before = performance.now();
    while (next < asks.length) {
      const index = next++;
      answers[index] = await call(asks[index]);
      const after = performance.now();
      seconds[index] = (after - before) / 1000;
      before = after;
    }
  };
  const began = performance.now();
  await Promise.all(Array.from({ length: workers }, work));
  return { took: (performance.now() - began) / 1000, seconds, answers };
}

export async function serve(calls) {
  console.log("ready");
  for await (const line of createInterface({ input: process.stdin })) {
    const { operation, asks, workers } = JSON.parse(line);
    console.log(JSON.stringify(await timed(calls[operation], asks, workers)));
  }
}
