//! End of a JSON object in a streamed text.

/// Position in a JSON object, which reads no byte twice.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ObjectScanner {
    n_bytes: usize,
    depth: usize,
    is_in_string: bool,
    is_escaped: bool,
}

impl ObjectScanner {
    /// Creates a scanner of the rest of an object, after one of its values.
    pub(super) fn within_object() -> Self {
        Self { depth: 1, ..Self::default() }
    }

    pub(super) fn is_at_start(&self) -> bool {
        self.n_bytes == 0
    }

    /// Reads on in a text that begins with the object. Returns the number of bytes of the object if it is complete.
    pub(super) fn end(&mut self, text: &str) -> Option<usize> {
        for byte in &text.as_bytes()[self.n_bytes..] {
            self.n_bytes += 1;
            if self.ends_with(*byte) {
                return Some(self.n_bytes);
            }
        }
        None
    }

    /// Reads the next text of the object. Returns the number of its bytes that are of the object if that is complete.
    pub(super) fn end_after(&mut self, next: &str) -> Option<usize> {
        self.n_bytes = 0;
        self.end(next)
    }

    /// Reads a byte. Returns true if it ends the object.
    fn ends_with(&mut self, byte: u8) -> bool {
        match byte {
            _ if self.is_escaped => self.is_escaped = false,
            b'\\' if self.is_in_string => self.is_escaped = true,
            b'"' => self.is_in_string = !self.is_in_string,
            _ if self.is_in_string => {}
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }
}
