"""Records the bytes between torch's TCPStore client and server, call by call.

    python tests/reference/store_bytes.py > candle-ext/comm/tests/fixtures/store.txt

One line per call: its name, the client's bytes and the server's bytes in hexadecimal. A proxy between the two records them.
"""

import datetime
import multiprocessing
import socket
import sys
import threading
import time

import torch
from torch.distributed import TCPStore

TIMEOUT = datetime.timedelta(seconds=20)
said = {"client": bytearray(), "server": bytearray()}


def pump(source, sink, name):
    while data := source.recv(65536):
        said[name] += data
        sink.sendall(data)


def proxy(listener, port):
    client, _ = listener.accept()
    server = socket.create_connection(("127.0.0.1", port))
    for pair in ((client, server, "client"), (server, client, "server")):
        threading.Thread(target=pump, args=pair, daemon=True).start()


def note(name):
    time.sleep(0.1)  # Calls without an answer return before their bytes have passed the proxy.
    print(name, *(bytes(said[who]).hex() or "-" for who in ("client", "server")), flush=True)
    for bytes_ in said.values():
        bytes_.clear()


def main():
    """Makes the calls in a child process: some of torch's hold the GIL, which the proxy needs."""
    server = TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=proxy, args=(listener, server.port), daemon=True).start()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=calls, args=(listener.getsockname()[1], theirs))
    child.start()
    while (name := ours.recv()) is not None:
        note(name)
        ours.send(None)
    child.join()


def calls(port, pipe):
    def note(name):
        pipe.send(name)
        pipe.recv()

    client = TCPStore("127.0.0.1", port, None, False, TIMEOUT, wait_for_workers=False)
    note("connect")
    client.set("key", "value")
    note("set")
    client.get("key")
    note("get")
    client.add("count", 5)
    note("add")
    client.add("count", -7)
    note("add_negative")
    client.check(["key", "count"])
    note("check")
    client.check(["key", "nothing"])
    note("check_missing")
    client.compare_set("key", "value", "new")
    note("compare_set")
    client.compare_set("key", "value", "newer")
    note("compare_set_other")
    client.wait(["key", "count"])
    note("wait")
    try:
        client.wait(["nothing"], datetime.timedelta(milliseconds=50))
    except torch.distributed.DistStoreError:
        note("wait_too_long")
    client.append("key", "er")
    note("append")
    client.num_keys()
    note("num_keys")
    client.multi_set(["a", "b"], ["1", "22"])
    note("multi_set")
    client.multi_get(["a", "b"])
    note("multi_get")
    client.queue_push("queue", "job")
    note("queue_push")
    client.queue_len("queue")
    note("queue_len")
    client.queue_pop("queue")
    note("queue_pop")
    client.delete_key("key")
    note("delete_key")
    client.delete_key("key")
    note("delete_key_missing")
    client.set("empty", "")
    note("set_empty")
    torch.distributed.PrefixStore("group", client).set("key", "inner")
    note("prefix_set")
    pipe.send(None)


if __name__ == "__main__":
    print(f"torch {torch.__version__}", file=sys.stderr)
    main()
