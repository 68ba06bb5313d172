//! Times of logs and records, in UTC.

use jiff::Timestamp;

/// Formats a time as in RFC 3339, with milliseconds: `2026-11-21T02:03:04.050Z`.
pub fn utc_timestamp(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn times_have_milliseconds_and_are_read_back() {
        let cases = [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_050, "2000-02-29T00:00:00.050Z"),
            (1_767_225_599_999, "2025-12-31T23:59:59.999Z"),
        ];
        for (milliseconds, want) in cases {
            let time = Timestamp::from_millisecond(milliseconds).unwrap();
            assert_eq!(utc_timestamp(time), want);
            assert_eq!(want.parse::<Timestamp>().unwrap(), time);
        }
    }
}
