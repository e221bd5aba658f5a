// Prints the events of a watch, one line of JSON each:  node listen.js URL TOKEN
import { EventSource } from "eventsource";

const [url, token] = process.argv.slice(2);
const source = new EventSource(url, {
  fetch: (input, init) => fetch(input, { ...init, headers: { ...init.headers, Authorization: `Bearer ${token}` } }),
});
const print = (event) => console.log(JSON.stringify([event.type, event.lastEventId, event.data ?? null]));
for (const type of ["open", "ready", "change"]) source.addEventListener(type, print);
source.addEventListener("error", (event) => console.log(JSON.stringify(["error", String(event.code ?? ""), null])));
