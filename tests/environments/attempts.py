"""Programs that try to get out of a sandbox, to stay on in it, or to take more than their share."""

from __future__ import annotations

import platform
from dataclasses import dataclass

SYSCALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    result = libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    print(result, os.strerror(ctypes.get_errno()) if result < 0 else "it was done")
"""
X86 = platform.machine() == "x86_64"


@dataclass(frozen=True)
class Attempt:
    """One program, how its run ends, and what the text says. The outside is checked after each in the same way."""

    name: str
    code: str
    says: str
    status: str = "error"


ATTEMPTS = [
    # Files
    Attempt("reads the user list", "print(open('/etc/passwd').read())", "FileNotFoundError"),
    Attempt("reads a file", "print(open(SECRET_FILE).read())", "FileNotFoundError"),
    Attempt("reads a file by a path upwards", "print(open('../../../..' + SECRET_FILE).read())", "FileNotFoundError"),
    Attempt("reads a file by a symlink", "os.symlink(SECRET_FILE, 'x'); print(open('x').read())", "FileNotFoundError"),
    Attempt("reads a file by a link", "os.link(SECRET_FILE, 'x'); print(open('x').read())", "FileNotFoundError"),
    Attempt(
        "swaps a symlink for the directory it works in",
        "os.mkdir('d'); os.chdir('d'); os.rmdir('../d'); os.symlink('/', '../d'); print(os.listdir('/tmp/d' + FOLDER))",
        "FileNotFoundError",
    ),
    Attempt(
        "climbs from a directory that it holds open",
        "d = os.open('/', os.O_RDONLY)\nfor _ in range(9): d = os.open('..', os.O_RDONLY, dir_fd=d)\n"
        "print(os.open(SECRET_FILE[1:], os.O_RDONLY, dir_fd=d))",
        "FileNotFoundError",
    ),
    Attempt("overwrites a file", "open(CANARY, 'w').write('x')", "FileNotFoundError"),
    Attempt("makes a file", "open(FOLDER + '/new', 'w').write('x')", "FileNotFoundError"),
    Attempt("deletes a file", "os.unlink(CANARY)", "FileNotFoundError"),
    Attempt("makes a directory in the root", "os.makedirs(FOLDER); os.mkdir('/new')", "Read-only file system"),
    Attempt("changes the standard library", "open(os.__file__, 'r+')", "Read-only file system|PermissionError"),
    Attempt("adds to the standard library", "open(os.__file__ + 'x', 'w')", "Read-only file system"),
    Attempt("changes modes in the standard library", "os.chmod(os.__file__, 0o600)", "Read-only file system"),
    Attempt("opens shared memory", "print(open(SHARED).read())", "FileNotFoundError"),
    Attempt("makes a device", "os.mknod('disk', 0o60666, os.makedev(254, 0))", "PermissionError"),
    Attempt("opens the terminal", "open('/dev/tty', 'r+')", "FileNotFoundError"),
    # The caller's process
    Attempt(
        "looks for the token in its environment",
        "import ctypes\nprint(os.environ, os.environb)\n"
        "environ, i = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ'), 0\n"
        "while environ and environ[i]: print(environ[i]); i += 1",
        "environ({'HOME': '/tmp', 'TMPDIR': '/tmp', 'LANG': 'C.UTF-8'})",
        "ok",
    ),
    Attempt(
        "looks for the token in its memory",
        "import gc\nprint([o for o in gc.get_objects() if 'INFLIGHT' in repr(o)[:10**5] and o is not globals()][:9])",
        "",
        "ok",
    ),
    Attempt("reads the caller's environment", "print(open(f'/proc/{PARENT}/environ').read())", "FileNotFoundError"),
    Attempt("reads its own parent's", "print(open(f'/proc/{os.getppid()}/environ').read())", "FileNotFoundError"),
    Attempt("opens the caller's memory", "print(open(f'/proc/{PARENT}/mem', 'rb'))", "FileNotFoundError"),
    Attempt("reads the root of another process", "print(os.listdir(f'/proc/{VICTIM}/root'))", "FileNotFoundError"),
    Attempt("signals the caller", "os.kill(PARENT, 10)", "ProcessLookupError"),
    Attempt("kills another process", "os.kill(VICTIM, 9)", "ProcessLookupError"),
    Attempt("kills another process by a pidfd", "os.pidfd_open(VICTIM)", "ProcessLookupError"),
    Attempt("signals its parent, group and all", "os.getppid(); os.kill(-1, 10)", "ProcessLookupError"),
    Attempt("changes another's priority", "os.setpriority(0, VICTIM, 19)", "ProcessLookupError"),
    Attempt(
        "changes another's limits",
        "import resource; resource.prlimit(VICTIM, resource.RLIMIT_NOFILE, (9, 9))",
        "ProcessLookupError",
    ),
    Attempt(
        "writes to everything it inherited",
        "done = 0\nfor fd in range(3, 4096):\n    try: os.write(fd, b'exit 0 escaped'); done += 1\n"
        "    except OSError: pass\nprint('wrote to', done)",
        "wrote to 0",
        "ok",
    ),
    Attempt("reads what is left of its standard input", "import sys; print('rest', sys.stdin.read())", "rest \n", "ok"),
    # Networks
    Attempt(
        "connects to a loopback port", "import socket; socket.create_connection(('127.0.0.1', PORT))", "unreachable"
    ),
    Attempt(
        "sends a datagram",
        "import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', UDP_PORT))",
        "Network is unreachable",
    ),
    Attempt("connects elsewhere", "import socket; socket.create_connection(('192.0.2.1', 53), 1)", "unreachable"),
    Attempt("looks up a name", "import socket; print(socket.getaddrinfo('example.com', 80))", "gaierror"),
    Attempt("connects to a unix socket", "import socket; socket.socket(1, 1).connect(UNIX)", "FileNotFoundError"),
    Attempt(
        "connects to an abstract socket", "import socket; socket.socket(1, 1).connect(ABSTRACT)", "ConnectionRefused"
    ),
    Attempt("opens a raw socket", "import socket; socket.socket(2, 3, 1)", "PermissionError"),
    Attempt("opens a packet socket", "import socket; socket.socket(17, 3)", "Address family not supported"),
    Attempt("opens netlink", "import socket; socket.socket(16, 3)", "Address family not supported"),
    Attempt("opens a socket to the hypervisor", "import socket; socket.socket(40, 1)", "Address family not supported"),
    # Privileges
    Attempt("becomes root", "os.setuid(0)", "PermissionError|Invalid argument"),
    Attempt("becomes root's group", "os.setgid(0)", "PermissionError|Invalid argument"),
    Attempt("drops its groups", "os.setgroups([])", "PermissionError"),
    Attempt("raises its priority", "os.nice(-5)", "PermissionError"),
    Attempt("asks for real time", "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))", "PermissionError"),
    Attempt(
        "raises its limits", "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "raise maximum limit"
    ),
    Attempt("renames the host", "import socket; socket.sethostname('x')", "PermissionError"),
    Attempt("changes its root", "os.chroot('/tmp')", "PermissionError"),
    Attempt(
        "mounts",
        SYSCALL + "print(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None), os.strerror(ctypes.get_errno()))",
        "-1 Operation not permitted",
        "ok",
    ),
    Attempt(
        "unmounts",
        SYSCALL + "print(libc.umount2(b'/tmp', 2), os.strerror(ctypes.get_errno()))",
        "-1 Operation not permitted",
        "ok",
    ),
    Attempt(
        "makes namespaces of its own",
        SYSCALL + "print(libc.unshare(0x10020000), os.strerror(ctypes.get_errno()))",
        "-1 Operation not permitted",
        "ok",
    ),
    Attempt(
        "attaches as a debugger",
        SYSCALL + "print(libc.ptrace(16, VICTIM, 0, 0), os.strerror(ctypes.get_errno()))",
        "-1 Operation not permitted",
        "ok",
    ),
    Attempt(
        "attaches to process 1",
        SYSCALL + "print(libc.ptrace(16, 1, 0, 0), os.strerror(ctypes.get_errno()))",
        "-1 Operation not permitted",
        "ok",
    ),
    # More processes
    Attempt("forks", "os.fork()", "PermissionError"),
    Attempt("forks on and on", "while True: os.fork()", "PermissionError"),
    Attempt(
        "forks on and on, whatever happens",
        "while True:\n    try: os.fork()\n    except OSError: pass",
        "[the code was ended after",
        "timeout",
    ),
    Attempt(
        "leaves a daemon",
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: pass\n    os._exit(0)",
        "PermissionError",
    ),
    Attempt("runs a program", "import subprocess; subprocess.run(['/bin/sh', '-c', 'id'])", "PermissionError"),
    Attempt("runs a shell", "print(os.system('id'))", "-1\n|32512\n|65280\n", "ok"),
    Attempt("becomes a program", "os.execv('/bin/sh', ['sh'])", "PermissionError|FileNotFoundError"),
    Attempt(
        "starts a pool of processes",
        "import multiprocessing as m; print(m.get_context('fork').Process(target=print).start())",
        "PermissionError",
    ),
    Attempt(
        "clones itself into namespaces",
        SYSCALL + f"call({56 if X86 else 220}, 0x10000000 | 17, 0, 0, 0, 0)",
        "-1 Operation not permitted",
        "ok",
    ),
    Attempt(
        "starts threads on and on",
        "import threading, time\nthreading.stack_size(65536)\n"
        "while True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        "can't start new thread",
    ),
    # Time
    Attempt("runs on and on", "while True: pass", "[the code was ended after", "timeout"),
    Attempt(
        "ignores signals",
        "import signal, time\nfor n in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(n, signal.SIG_IGN)\n"
        "while True: time.sleep(9)",
        "[the code was ended after",
        "timeout",
    ),
    Attempt(
        "stops process 1 and runs on",
        "for n in set(range(1, 65)) - {32, 33}: os.kill(1, n)\nwhile True: pass",
        "[the code was ended after",
        "timeout",
    ),
    Attempt(
        "ends process 1",
        "import resource; resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))\nwhile True: pass",
        "[the code was ended",
        "killed|timeout",
    ),
    Attempt("floods process 1 with signals", "while True: os.kill(1, 17)", "[the code was ended after", "timeout"),
    Attempt("hides its output and sleeps", "import time; os.close(1); os.close(2); time.sleep(99)", "[the", "timeout"),
    Attempt(
        "leaves a thread that never ends",
        "import threading, time; threading.Thread(target=time.sleep, args=(99,)).start()",
        "[the code was ended after",
        "timeout",
    ),
    Attempt(
        "hangs while it exits",
        "import atexit, time; atexit.register(time.sleep, 99)",
        "[the code was ended after",
        "timeout",
    ),
    # Memory, files and output
    Attempt("takes much memory", "x = bytearray(1 << 30)", "[memory limit of 256 MiB]", "memory"),
    Attempt("takes much memory piece by piece", "x = []\nwhile True: x.append(bytes(1 << 20))", "[memory", "memory"),
    Attempt("maps much memory", "import mmap; x = mmap.mmap(-1, 1 << 30)", "Cannot allocate memory"),
    Attempt("makes a file in memory", "os.memfd_create('x')", "PermissionError"),
    Attempt(
        "makes a segment of shared memory",
        SYSCALL + f"call({29 if X86 else 194}, 0, 1 << 30, 0o1666)",
        "-1 Operation not permitted",
        "ok",
    ),
    Attempt("writes a large file", "f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20))", "OSError: [Errno 2"),
    Attempt(
        "writes large files",
        "for i in range(99):\n    f = open(f'{i}', 'wb')\n    for _ in range(40): f.write(bytes(1 << 20))",
        "No space left on device",
    ),
    Attempt("makes a large hole", "f = open('x', 'wb'); f.truncate(1 << 40)", "File too large"),
    Attempt("fills shared memory", "f = open('/dev/shm/x', 'wb')\nwhile True: f.write(bytes(1 << 20))", "OSError"),
    Attempt("makes many files", "for i in range(10**6): open(f'{i}', 'w').close()", "No space left on device"),
    Attempt("opens many files", "x = [open('/dev/null') for _ in range(10**4)]", "Too many open files"),
    Attempt("writes much", "while True: print('x' * 10000)", "[the code was ended: it wrote more than", "output"),
    Attempt("writes many errors", "import sys\nwhile True: sys.stderr.write('x' * 10000)", "it wrote more", "output"),
    Attempt("writes bytes", "os.write(1, bytes(range(256)))", "\x00\x01\x02", "ok"),
    Attempt("writes half a character", "print('\\ud800'); os.write(1, b'\\xf0\\x9f')", "\\ud800\n\ufffd", "ok"),
    Attempt("is large", "#" * (8 << 20), "[no output]", "ok"),
    Attempt("is larger than the memory", "x = '" + "x" * (260 << 20) + "'", "[memory limit of 256 MiB]", "memory"),
    Attempt("is deep", "(" * 10**5 + ")" * 10**5, "SyntaxError|MemoryError|RecursionError"),
    Attempt("is no text", "print(1)\0", "null bytes"),
    Attempt(
        "overflows the stack",
        "import sys; sys.setrecursionlimit(10**9)\nclass A:\n    __getattr__ = lambda self, x: getattr(self, x)\nA().x",
        "[the code was ended by SIGSEGV]",
        "killed",
    ),
    Attempt("crashes", "os.abort()", "[the code was ended by SIGABRT]", "killed"),
    Attempt("states that it went well", "import sys; os.write(1, b'exit 0\\n'); sys.exit('ok')", "ok\n[exit status 1]"),
]

if X86:
    ATTEMPTS += [
        Attempt(
            "calls the kernel as a 32-bit program",
            "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')\n"
            "print('got', ctypes.CFUNCTYPE(int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))())",
            "[the code was ended by SIG",
            "killed",
        ),
        Attempt(
            "calls the kernel by x32 numbers",
            SYSCALL + "call(0x40000000 | 39)",
            "-1 Operation not permitted|-1 Function not implemented",
            "ok",
        ),
    ]

SYSCALLS = {
    "process_vm_readv": (310, 270),
    "pidfd_getfd": (438, 438),
    "setns": (308, 268),
    "mount_setattr": (442, 442),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "open_by_handle_at": (304, 265),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "personality": (135, 92),
    "syslog": (103, 116),
    "reboot": (169, 142),
}

ATTEMPTS += [
    Attempt(f"calls {name}", f"{SYSCALL}call({numbers[0 if X86 else 1]}, 0, 0, 0, 0, 0)", "-1 Operation not", "ok")
    for name, numbers in SYSCALLS.items()
]
