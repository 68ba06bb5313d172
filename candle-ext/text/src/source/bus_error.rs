//! SIGBUS handler that names a memory-mapped file truncated during a read.
//!
//! Reading beyond the new end of the file raises SIGBUS, which ends a process without a message. The handler finds
//! the file's name in `/proc/self/maps`. It covers data sets, token caches and weights.

use std::sync::Once;

/// Exit code for unreadable data.
const EXIT_CODE: i32 = 3;

/// Installs a handler that names a memory-mapped file truncated by another process, and exits with code 3.
pub fn report_shortened_files() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: the action is zero-initialised, as sigaction(2) allows, and its handler has the signature that
        // SA_SIGINFO requires. The handler calls async-signal-safe functions only.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) as usize;
            // On the thread's own stack: an alternate one is hardly larger than the frame that holds AVX-512's registers.
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
        }
    });
}

extern "C" fn handle(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo_t, whose address field belongs to SIGBUS.
    let address = unsafe { (*info).si_addr() } as usize;
    write(b"error: failed to read a mapped file: ");
    write_path(address);
    write(b" was shortened while it was read; leave files alone while they are in use, and start again\n");
    // SAFETY: _exit(2) ends the process without running anything else.
    unsafe { libc::_exit(EXIT_CODE) }
}

fn write(bytes: &[u8]) {
    // SAFETY: the pointer and the length are those of one slice.
    unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
}

/// Writes the path of the mapping that contains `address`, without allocating.
fn write_path(address: usize) {
    // SAFETY: the path ends with a zero byte.
    let file = unsafe { libc::open(c"/proc/self/maps".as_ptr(), libc::O_RDONLY) };
    let mut line = Line::default();
    let mut chunk = [0u8; 1024];
    loop {
        // SAFETY: the pointer and the length are those of one array.
        let n_read = unsafe { libc::read(file, chunk.as_mut_ptr().cast(), chunk.len()) };
        let Some(read) = usize::try_from(n_read).ok().filter(|n_read| *n_read > 0) else { break };
        for &byte in &chunk[..read] {
            if byte != b'\n' {
                line.push(byte);
            } else if line.holds(address) {
                return write(line.path());
            } else {
                line.length = 0;
            }
        }
    }
    write(b"it");
}

/// One line of `/proc/self/maps`: "7f00-7f10 r--p 00000000 fe:00 123      /path".
struct Line {
    bytes: [u8; 4352],
    length: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self { bytes: [0; 4352], length: 0 }
    }
}

impl Line {
    fn push(&mut self, byte: u8) {
        if let Some(place) = self.bytes.get_mut(self.length) {
            *place = byte;
            self.length += 1;
        }
    }

    fn text(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    fn holds(&self, address: usize) -> bool {
        let mut bounds = [0usize; 2];
        let mut bound_idx = 0;
        for &byte in self.text() {
            match (byte as char).to_digit(16) {
                Some(digit) => bounds[bound_idx] = bounds[bound_idx] << 4 | digit as usize,
                None if byte == b'-' && bound_idx == 0 => bound_idx = 1,
                None => break,
            }
        }
        (bounds[0]..bounds[1]).contains(&address)
    }

    fn path(&self) -> &[u8] {
        let start = self.text().iter().position(|&byte| byte == b'/');
        start.map_or(b"it", |start| &self.text()[start..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_maps_names_its_bounds_and_file() {
        let mut line = Line::default();
        for byte in b"7f0012ab0000-7f0012ac0000 r--p 00000000 fe:00 123      /data/my rows.jsonl" {
            line.push(*byte);
        }
        assert_eq!(line.path(), b"/data/my rows.jsonl");
        for (address, want) in
            [(0x7f00_12ab_0000, true), (0x7f00_12ab_ffff, true), (0x7f00_12ac_0000, false), (0, false)]
        {
            assert_eq!(line.holds(address), want, "{address:x}");
        }
    }
}
