//! Bytes of a stream as whole lines with something before each: what keeps workers from writing into each other's lines.

/// Cuts a stream into lines. A line ends with `\n`, `\r\n` or, as progress bars end theirs, `\r`.
#[derive(Debug)]
pub struct Lines {
    prefix: Vec<u8>,
    /// The beginning of a line whose end has not come.
    open: Vec<u8>,
    /// The last byte was `\r`: a `\n` after it ends no line of its own.
    after_return: bool,
}

/// A line that does not end is cut here, so that a stream without lines does not fill the memory.
const LONGEST: usize = 1 << 20;

impl Lines {
    /// Starts a stream whose lines will begin with `prefix`.
    pub fn new(prefix: &str) -> Self {
        Self { prefix: prefix.as_bytes().to_vec(), open: Vec::new(), after_return: false }
    }

    /// Takes bytes in, and hands every line that they complete to `each`: with the prefix and a `\n`.
    pub fn push(&mut self, bytes: &[u8], mut each: impl FnMut(&[u8])) {
        for &byte in bytes {
            let is_second_half = byte == b'\n' && self.after_return;
            self.after_return = byte == b'\r';
            match byte {
                _ if is_second_half => {}
                b'\n' | b'\r' => self.close(&mut each),
                _ => self.append(byte, &mut each),
            }
        }
    }

    /// Hands the last line to `each`, if it did not end.
    pub fn finish(&mut self, mut each: impl FnMut(&[u8])) {
        if !self.open.is_empty() {
            self.close(&mut each);
        }
    }

    fn append(&mut self, byte: u8, each: &mut impl FnMut(&[u8])) {
        if self.open.is_empty() {
            self.open.extend_from_slice(&self.prefix);
        }
        self.open.push(byte);
        if self.open.len() >= LONGEST {
            self.close(each);
        }
    }

    fn close(&mut self, each: &mut impl FnMut(&[u8])) {
        if self.open.is_empty() {
            self.open.extend_from_slice(&self.prefix);
        }
        self.open.push(b'\n');
        each(&self.open);
        self.open.clear();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(pieces: &[&str], want: &str) {
        let mut lines = Lines::new("[3]: ");
        let mut got = Vec::new();
        pieces.iter().for_each(|piece| lines.push(piece.as_bytes(), |line| got.extend_from_slice(line)));
        lines.finish(|line| got.extend_from_slice(line));
        assert_eq!(String::from_utf8(got).unwrap(), want);
    }

    #[test]
    fn every_line_gets_the_prefix_wherever_the_stream_is_cut() {
        let want = "[3]: one\n[3]: \n[3]: two\n";
        check(&["one\n\ntwo\n"], want);
        check(&["on", "e", "\n", "\ntw", "o\n"], want);
        check(&["one\r", "\n\r\ntwo\r\n"], want);
    }

    #[test]
    fn a_line_without_an_end_gets_one() {
        check(&["one\ntwo"], "[3]: one\n[3]: two\n");
        check(&[], "");
    }

    #[test]
    fn a_progress_bar_is_a_line_at_a_time() {
        check(&["10%\r20%\r", "done\n"], "[3]: 10%\n[3]: 20%\n[3]: done\n");
    }

    #[test]
    fn a_stream_without_lines_is_cut() {
        let mut lines = Lines::new("");
        let mut longest = 0;
        lines.push(&vec![b'x'; 3 * LONGEST], |line| longest = longest.max(line.len()));
        assert_eq!(longest, LONGEST + 1);
    }
}
