//! Counts and sizes in words.

/// Returns a count with its noun: `1 row`, `1,234 rows`. The noun is in the singular.
pub fn counted(n: impl TryInto<u64>, noun: &str) -> String {
    let n = n.try_into().unwrap_or(u64::MAX);
    let plural = match noun {
        _ if n == 1 => "",
        // Its last sound is that of "k".
        "epoch" => "s",
        _ if noun.ends_with("ch") || noun.ends_with("sh") => "es",
        _ => "s",
    };
    format!("{} {noun}{plural}", grouped(n))
}

/// Returns an interval: `every epoch`, `every 3 epochs`.
pub fn every_n(n: usize, noun: &str) -> String {
    if n == 1 { format!("every {noun}") } else { format!("every {}", counted(n, noun)) }
}

/// Formats a count with separators: `1,234,567`.
pub fn grouped(n: impl TryInto<u64>) -> String {
    let digits = n.try_into().unwrap_or(u64::MAX).to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (idx, digit) in digits.chars().enumerate() {
        if idx > 0 && (digits.len() - idx).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats bytes in the decimal unit that fits: `512 bytes`, `1.50 MB`, `16.06 GB`.
pub fn decimal_bytes(n: u64) -> String {
    match n {
        0..1_000 => counted(n, "byte"),
        1_000..1_000_000 => format!("{:.2} KB", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} MB", n as f64 / 1e6),
        _ => format!("{:.2} GB", n as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_of_one_has_a_noun_in_the_singular() {
        let cases = [(0, "row", "0 rows"), (1, "row", "1 row"), (2000, "row", "2,000 rows"), (2, "batch", "2 batches")];
        cases.iter().for_each(|(n, noun, want)| assert_eq!(counted(*n as u64, noun), *want));
        assert_eq!([every_n(1, "epoch"), every_n(3, "epoch")], ["every epoch", "every 3 epochs"]);
    }

    #[test]
    fn counts_have_separators() {
        let cases = [(0, "0"), (999, "999"), (1000, "1,000"), (134_515_008, "134,515,008")];
        cases.iter().for_each(|(n, want)| assert_eq!(grouped(*n as usize), *want));
    }

    #[test]
    fn sizes_have_the_unit_that_fits() {
        let cases = [
            (1, "1 byte"),
            (999, "999 bytes"),
            (1_500, "1.50 KB"),
            (2_104_000, "2.10 MB"),
            (16_060_522_496, "16.06 GB"),
        ];
        cases.iter().for_each(|(n, want)| assert_eq!(decimal_bytes(*n), *want));
    }
}
