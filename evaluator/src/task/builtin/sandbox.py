# Runs a program in a child process and writes a secret word to stdout if the program succeeds.
# Arguments: time limit in seconds, memory limit in bytes, process limit. Standard input: one line with the word, then
# the program.
# Exit codes: 0 with the word on success, 10 for a failed program, another code if the child could not be prepared.
import ctypes, os, random, resource, select, signal, sys, time

FAILED = 10
libc = ctypes.CDLL(None)


def n_threads_of_user():
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat("/proc/" + name).st_uid == os.getuid():
                count += len(os.listdir("/proc/" + name + "/task"))
        except OSError:
            pass
    return count


def limit(kind, most):
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def child(program, limits, key, done):
    # The child is killed when its parent ends.
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    # File descriptors that the program cannot guess.
    high = random.SystemRandom().sample(range(100, 900), 2)
    for fd, number in zip((key, done), high):
        os.dup2(fd, number, inheritable=False)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    for fd in (key, done, null):
        os.close(fd)
    for kind, most in limits:
        limit(kind, most)
    os.write(high[1], b"+")
    code = compile(program, "program", "exec")
    exec(code, {"__name__": "program"})
    os.write(high[1], os.read(high[0], 64))


def children():
    try:
        with open("/proc/thread-self/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def end_all(pid):
    """Ends the child, and what was left behind by it: orphans become children of this process."""
    end = time.monotonic() + 2
    while time.monotonic() < end:
        for each in {pid, *children()}:
            try:
                os.kill(each, signal.SIGKILL)
            except OSError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def answer(done, seconds):
    """Reads what the child writes until it closes its end or time is over."""
    end, text = time.monotonic() + seconds, b""
    while len(text) < 64:
        if not select.select([done], [], [], max(0, end - time.monotonic()))[0]:
            break
        part = os.read(done, 64)
        if not part:
            break
        text += part
    return text


def main():
    word = sys.stdin.buffer.readline().strip()
    program = sys.stdin.buffer.read().decode()
    seconds, size, processes = map(int, sys.argv[1:])
    limits = [
        (resource.RLIMIT_CPU, seconds + 1),
        (resource.RLIMIT_AS, size),
        (resource.RLIMIT_FSIZE, 16 << 20),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, n_threads_of_user() + processes),
    ]
    # Orphans of the child become children of this process.
    libc.prctl(36, 1, 0, 0, 0)
    # The child is process 1 of new user, process and network namespaces, where the kernel allows them.
    libc.unshare(0x10000000 | 0x20000000 | 0x40000000) == 0 or libc.unshare(0x10000000 | 0x40000000)
    key, done = os.pipe(), os.pipe()
    os.write(key[1], word)
    pid = os.fork()
    if pid == 0:
        try:
            child(program, limits, key[0], done[1])
        finally:
            os._exit(1)
    os.close(done[1])
    os.close(key[0])
    text = answer(done[0], seconds)
    end_all(pid)
    if not text.startswith(b"+"):
        sys.exit("the child was not prepared")
    if text != b"+" + word:
        os._exit(FAILED)
    os.write(1, word)


main()
