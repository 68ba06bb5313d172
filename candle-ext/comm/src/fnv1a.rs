//! FNV-1a, a hash that is equal in every build and on every machine.

/// Returns the 64-bit hash of numbers: of bytes, or of words in place of bytes.
pub(crate) fn fnv1a(numbers: impl IntoIterator<Item = u64>) -> u64 {
    numbers.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, number| (hash ^ number).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_hash_to_the_published_values() {
        let of = |text: &str| fnv1a(text.bytes().map(u64::from));
        assert_eq!(["", "a", "foobar"].map(of), [0xcbf2_9ce4_8422_2325, 0xaf63_dc4c_8601_ec8c, 0x8594_4171_f739_67e8]);
    }
}
