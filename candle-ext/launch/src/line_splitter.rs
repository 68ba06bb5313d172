//! Splits a byte stream into lines, so that output of different workers does not interleave within a line.

/// Splits a stream into lines. A line ends with `\n`, `\r\n`, or the `\r` of a progress bar.
#[derive(Debug, Default)]
pub struct LineSplitter {
    /// The incomplete last line.
    unfinished: Vec<u8>,
    /// The last line was ended before its `\n`. A `\n` that follows ends no other line.
    ended_without_newline: bool,
}

/// The longest line. Longer ones are split, so that a stream without newlines uses bounded memory.
const MAX_LINE_BYTES: usize = 1 << 20;

impl LineSplitter {
    /// Appends bytes and calls `each` for every completed line, which ends with `\n`.
    pub fn push(&mut self, bytes: &[u8], mut each: impl FnMut(&[u8])) {
        for &byte in bytes {
            let had_no_newline = std::mem::take(&mut self.ended_without_newline);
            match byte {
                b'\n' if had_no_newline => {}
                b'\n' => self.finish_line(&mut each),
                // Some progress bars begin a line with `\r`.
                b'\r' if self.unfinished.is_empty() => {}
                b'\r' => self.finish_line_early(&mut each),
                _ => self.unfinished.push(byte),
            }
            if self.unfinished.len() >= MAX_LINE_BYTES {
                self.finish_line_early(&mut each);
            }
        }
    }

    /// Calls `each` for the incomplete last line, if there is one.
    pub fn finish(&mut self, mut each: impl FnMut(&[u8])) {
        if !self.unfinished.is_empty() {
            self.finish_line(&mut each);
        }
    }

    fn finish_line_early(&mut self, each: &mut impl FnMut(&[u8])) {
        self.finish_line(each);
        self.ended_without_newline = true;
    }

    fn finish_line(&mut self, each: &mut impl FnMut(&[u8])) {
        self.unfinished.push(b'\n');
        each(&self.unfinished);
        self.unfinished.clear();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(chunks: &[&str], want: &str) {
        let mut lines = LineSplitter::default();
        let mut got = Vec::new();
        chunks.iter().for_each(|chunk| lines.push(chunk.as_bytes(), |line| got.extend_from_slice(line)));
        lines.finish(|line| got.extend_from_slice(line));
        assert_eq!(String::from_utf8(got).unwrap(), want);
    }

    #[test]
    fn lines_do_not_depend_on_chunk_boundaries() {
        let want = "one\n\ntwo\n";
        check(&["one\n\ntwo\n"], want);
        check(&["on", "e", "\n", "\ntw", "o\n"], want);
        check(&["one\r", "\n\r\ntwo\r\n"], want);
    }

    #[test]
    fn an_unfinished_last_line_gets_a_newline() {
        check(&["one\ntwo"], "one\ntwo\n");
        check(&[], "");
    }

    #[test]
    fn each_update_of_a_progress_bar_is_a_line() {
        check(&["10%\r20%\r", "done\n"], "10%\n20%\ndone\n");
        check(&["\r10%", "\r20%\r\n", "done\n"], "10%\n20%\ndone\n");
    }

    #[test]
    fn a_line_longer_than_the_limit_is_split() {
        let mut lines = LineSplitter::default();
        let mut longest = 0;
        lines.push(&vec![b'x'; 3 * MAX_LINE_BYTES], |line| longest = longest.max(line.len()));
        assert_eq!(longest, MAX_LINE_BYTES + 1);
        let mut n_lines = 0;
        lines.push(b"\n", |_| n_lines += 1);
        assert_eq!(n_lines, 0, "the split ended the line");
    }
}
