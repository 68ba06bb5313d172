//! The `Retry-After` header: seconds, or a date.

use std::time::{Duration, SystemTime};

/// Parses the `Retry-After` header. A date in the past means no wait.
pub(super) fn retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    match value.parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => Some(httpdate::parse_http_date(value).ok()?.duration_since(now).unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[track_caller]
    fn check(value: &str, now: u64, want: Option<u64>) {
        let wait = retry_after(value, UNIX_EPOCH + Duration::from_secs(now));
        assert_eq!(wait.map(|wait| wait.as_secs()), want, "{value:?}");
    }

    #[test]
    fn a_wait_is_a_number_of_seconds_or_a_date() {
        check(" 120 ", 0, Some(120));
        check("Thu, 01 Jan 1970 00:01:00 GMT", 0, Some(60));
        check("Wed, 21 Oct 2015 07:28:00 GMT", 1_445_412_400, Some(80));
        check("Thu, 29 Feb 2024 00:00:00 GMT", 1_709_164_799, Some(1));
        check("Wed, 21 Oct 2015 07:28:00 GMT", 1_800_000_000, Some(0));
        for nonsense in
            ["", "soon", "-1", "Wed, 21 Okt 2015 07:28:00 GMT", "Wed, 21 Oct 2015 07:28 GMT", "a 0 Jan 0 0:0:0 GMT"]
        {
            check(nonsense, 0, None);
        }
    }
}
