// llama.cpp for peers.py, through node-llama-cpp; the protocol is that of `serve` there.
//
//     node peers_llama.mjs LIBRARY MODEL.gguf THREADS SEQUENCES LENGTH

import {createInterface} from "node:readline";

const [library, modelPath, threads, sequences, length] = process.argv.slice(2);
const {getLlama} = await import(`${library}/dist/index.js`);
const llama = await getLlama({gpu: false, build: "never", progressLogs: false, maxThreads: Number(threads)});
const model = await llama.loadModel({modelPath, gpuLayers: 0});
const context = await model.createContext({
    contextSize: Number(length), sequences: Number(sequences), threads: Number(threads), batchSize: 512, flashAttention: true
});
const all = Array.from({length: Number(sequences)}, () => context.getSequence());
const seconds = () => process.cpuUsage(), cpu = () => (({user, system}) => (user + system) / 1e6)(seconds());
const reply = (answer) => process.stdout.write(`PEER ${JSON.stringify(answer)}\n`);

async function generate({prompts, new: count}) {
    const marks = [[performance.now() / 1e3, cpu()]];
    let begun = 0, made = 0, madeAtFirst = 0;
    await Promise.all(prompts.map(async (prompt, index) => {
        await all[index].clearHistory();
        let own = 0;
        for await (const token of all[index].evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
            made++;
            if (++own === 1 && ++begun === prompts.length) {
                marks.push([performance.now() / 1e3, cpu()]);
                madeAtFirst = made;
            }
            if (own === count) break;
        }
    }));
    marks.push([performance.now() / 1e3, cpu()]);
    const spent = (clock) => [marks[1][clock] - marks[0][clock], marks[2][clock] - marks[1][clock]];
    return {wall_s: spent(0), cpu_s: spent(1), rest: made - madeAtFirst};
}

reply({});
for await (const line of createInterface({input: process.stdin})) reply(await generate(JSON.parse(line)));
process.exit(0);
