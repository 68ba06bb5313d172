# Runs a program in a child process and writes a secret word to stdout if the program succeeds.
# Arguments: time limit in seconds, memory limit in bytes, process limit, and "confined" to refuse programs that could
# write outside of the working folder. Standard input: one line with the word, then the program.
# Exit codes: 0 with the word on success, 10 for a failed program, 11 if the kernel cannot confine the program, another
# code if the child could not be prepared.
import ctypes, os, random, resource, select, signal, struct, sys, time

FAILED, UNCONFINED = 10, 11
SHARED_MEMORY = b"/dev/shm"
# Namespaces, for unshare.
USER, NETWORK, PROCESSES, MOUNTS, IPC = 0x10000000, 0x40000000, 0x20000000, 0x00020000, 0x08000000
# For mount and mount_setattr. The numbers of newer system calls are equal on all architectures.
MS_BIND, MS_REC_PRIVATE, MS_NOSUID_NODEV = 0x1000, 0x44000, 6
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
# For Landlock: write, remove, create, rename between folders, and truncate.
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_VERSION, LANDLOCK_PATH_BENEATH = 1, 1
WRITES, FILE_WRITES = 0b111111111110010, 0b100000000000010
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, CAPABILITY_VERSION = 1, 36, 38, 0x20080522
libc = ctypes.CDLL(None)
libc.syscall.restype = ctypes.c_long


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


def enter_namespaces():
    """Enters namespaces, where the kernel allows them. The next child is process 1 of its own. Returns true if this
    process may mount."""
    user, group = os.getuid(), os.getgid()
    if libc.unshare(USER | NETWORK | PROCESSES | MOUNTS | IPC) != 0:
        libc.unshare(USER | NETWORK | PROCESSES) == 0 or libc.unshare(USER | NETWORK)
        return False
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open("/proc/self/" + name, "w") as file:
                file.write(text)
    except OSError:
        return False
    return True


def mount_read_only(folder):
    """Mounts all file systems read-only, except `folder` and a new one for shared memory. Returns true for each of
    the two steps that succeeds."""
    private = libc.mount(None, b"/", None, MS_REC_PRIVATE, None) == 0
    own = libc.mount(os.fsencode(folder), os.fsencode(folder), None, MS_BIND, None) == 0
    shared = libc.mount(b"tmpfs", SHARED_MEMORY, b"tmpfs", MS_NOSUID_NODEV, b"size=64m") == 0
    read_only = private and own and set_attributes(b"/", AT_RECURSIVE, READ_ONLY, 0)
    if read_only:
        set_attributes(os.fsencode(folder), 0, 0, READ_ONLY)
        shared = shared and set_attributes(SHARED_MEMORY, 0, 0, READ_ONLY)
    # The working folder is on the new mount only after this.
    os.chdir(folder)
    return read_only, shared


def set_attributes(path, flags, new, cleared):
    attributes = struct.pack("4Q", new, cleared, 0, 0)
    return libc.syscall(MOUNT_SETATTR, AT_FDCWD, path, flags, attributes, ctypes.c_size_t(len(attributes))) == 0


def restrict_writes(writable):
    """Returns true if Landlock forbids this process to write, create, rename and remove files elsewhere."""
    # Versions before 3 do not forbid truncation.
    if libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_VERSION) < 3:
        return False
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, struct.pack("Q", WRITES), ctypes.c_size_t(8), 0)
    for path in filter(os.path.exists, writable):
        file = os.open(path, os.O_PATH)
        writes = WRITES if os.path.isdir(path) else FILE_WRITES
        libc.syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_PATH_BENEATH, struct.pack("=Qi", writes, file), 0)
        os.close(file)
    restricted = libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return restricted


def drop_privileges():
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.capset(struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24))


def child(program, limits, confine, key, done):
    # The child is killed when its parent ends.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
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
    drop_privileges()
    if not confine():
        os.write(high[1], b"-")
        return
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
    seconds, size, processes = map(int, sys.argv[1:4])
    needs_confinement = sys.argv[4] == "confined"
    limits = [
        (resource.RLIMIT_CPU, seconds + 1),
        (resource.RLIMIT_AS, size),
        (resource.RLIMIT_FSIZE, 16 << 20),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, n_threads_of_user() + processes),
    ]
    # Orphans of the child become children of this process.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    read_only, shared = mount_read_only(os.getcwd()) if enter_namespaces() else (False, False)
    writable = [b".", b"/dev/null", b"/dev/zero", b"/dev/full"] + [SHARED_MEMORY] * shared
    confine = lambda: restrict_writes(writable) or read_only or not needs_confinement
    key, done = os.pipe(), os.pipe()
    os.write(key[1], word)
    pid = os.fork()
    if pid == 0:
        try:
            child(program, limits, confine, key[0], done[1])
        finally:
            os._exit(1)
    os.close(done[1])
    os.close(key[0])
    text = answer(done[0], seconds)
    end_all(pid)
    if text.startswith(b"-"):
        sys.exit(UNCONFINED)
    if not text.startswith(b"+"):
        sys.exit("the child was not prepared")
    if text != b"+" + word:
        os._exit(FAILED)
    os.write(1, word)


main()
