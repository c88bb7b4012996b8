"""llama.cpp's own HTTP server with one GGUF file, on the loopback address; a program for a child process.

    python llama_server.py FILE PORT

It prints the address when it listens, and stays until it is killed: the extension has no way to stop.
"""

import signal
import sys

import xllamacpp

if __name__ == "__main__":
    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = sys.argv[1], {"smollm2"}
    params.hostnames, params.port = ["127.0.0.1"], int(sys.argv[2])
    params.n_ctx, params.n_parallel = 4096, 2  # 2048 tokens for each of two
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # more of them would spin and wait
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()
