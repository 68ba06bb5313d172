//! Our store's client and server against those of torch. Skipped with a note if no Python with torch is found, which
//! `CANDLEWICK_PYTHON` selects. `tests/store.rs` replays recorded bytes instead.

use std::io::{self, BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use candlewick_comm::store::{Client, Server};

const LONG: Duration = Duration::from_secs(120);

#[test]
fn our_client_uses_torchs_servers() {
    let Some(python) = python_with_torch() else { return };
    let script = "
import sys, datetime
from torch.distributed import TCPStore
stores = [TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False, use_libuv=uv) for uv in (True, False)]
print(*(store.port for store in stores), flush=True)
for store in stores:
    assert store.get('from-rust') == b'rust', store.get('from-rust')
    store.set('from-python', b'python')
sys.stdin.read()
";
    let mut child = spawn(&python, script, &[]);
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let ports: Vec<u16> = line.split_whitespace().map(|port| port.parse().unwrap()).collect();
    assert_eq!(ports.len(), 2, "{line}");
    for port in ports {
        let store = Client::connect("127.0.0.1", port, LONG).unwrap();
        store.set("from-rust", b"rust").unwrap();
        assert_eq!(store.get("from-python").unwrap(), b"python");
        assert_eq!((store.add("n", 4).unwrap(), store.add("n", -1).unwrap()), (4, 3));
        assert_eq!(store.get("n").unwrap(), b"3");
        assert!(store.check(&["n", "from-rust"]).unwrap() && !store.check(&["n", "nothing"]).unwrap());
        assert!(store.wait_for(&["nothing"], Duration::from_millis(30)).is_err());
        assert_eq!(store.compare_set("n", b"3", b"5").unwrap(), b"5");
        assert_eq!(store.compare_set("n", b"3", b"6").unwrap(), b"5");
        store.append("n", b"0").unwrap();
        assert_eq!(store.get("n").unwrap(), b"50");
        let n_keys = store.num_keys().unwrap();
        assert!(store.delete_key("n").unwrap() && !store.delete_key("n").unwrap());
        assert_eq!(store.num_keys().unwrap(), n_keys - 1);
        let id: Vec<u8> = (0..128).collect();
        store.set("id", &id).unwrap();
        assert_eq!(store.new_connection().unwrap().get("id").unwrap(), id);
    }
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn torchs_clients_use_our_server() {
    let Some(python) = python_with_torch() else { return };
    let server = Server::bind_any(0).unwrap();
    let script = "
import sys, datetime, torch
from torch.distributed import TCPStore, PrefixStore
port = int(sys.argv[1])
for uv in (True, False):
    s = TCPStore('127.0.0.1', port, None, False, wait_for_workers=False, use_libuv=uv)
    name = f'uv{uv}'
    assert s.get('from-rust') == b'rust'
    assert s.add(name, 4) == 4 and s.add(name, -1) == 3 and s.get(name) == b'3'
    assert s.check([name]) and not s.check([name, 'nothing'])
    assert s.compare_set(name, '3', '5') == b'5' and s.compare_set(name, '3', '6') == b'5'
    s.append(name, '0')
    assert s.get(name) == b'50'
    s.multi_set(['a', 'b'], ['1', '22'])
    assert s.multi_get(['a', 'b']) == [b'1', b'22']
    try:
        s.wait(['nothing'], datetime.timedelta(milliseconds=30))
        raise AssertionError('waited for nothing')
    except torch.distributed.DistStoreError:
        pass
    n = s.num_keys()
    assert s.delete_key(name) and not s.delete_key(name) and s.num_keys() == n - 1
    if uv:
        s.queue_push('q', 'job')
        assert s.queue_len('q') == 1 and s.queue_pop('q') == b'job' and s.queue_len('q') == 0
        assert 'a' in [key.strip('/') for key in s.list_keys()], s.list_keys()
    c = s.clone()
    PrefixStore('group', c).set(f'done{uv}', 'yes')
torch.distributed.init_process_group('gloo', store=s, rank=0, world_size=1)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
";
    let store = Client::connect("127.0.0.1", server.port(), LONG).unwrap();
    store.set("from-rust", b"rust").unwrap();
    let mut child = spawn(&python, script, &[&server.port().to_string()]);
    assert_eq!(store.with_prefix("group").get("doneTrue").unwrap(), b"yes");
    assert!(child.wait().unwrap().success());
    assert_eq!(store.get("group/doneFalse").unwrap(), b"yes");
}

fn spawn(python: &PathBuf, script: &str, arguments: &[&str]) -> Child {
    let mut command = Command::new(python);
    command.args(["-c", script]).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
    command.spawn().unwrap()
}

fn python_with_torch() -> Option<PathBuf> {
    let python = std::env::var_os("CANDLEWICK_PYTHON").map_or_else(|| PathBuf::from("python3"), PathBuf::from);
    let has_torch = Command::new(&python).args(["-c", "import torch.distributed"]).stderr(Stdio::null()).status();
    if has_torch.is_ok_and(|status| status.success()) {
        return Some(python);
    }
    let _ = writeln!(
        io::stderr(),
        "skipped: {} is no Python with torch; CANDLEWICK_PYTHON names another",
        python.display()
    );
    None
}
