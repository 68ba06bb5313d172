//! How long a server asks to wait: seconds, or a date.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// Reads the header `Retry-After`. A date that is over is no wait at all.
pub(super) fn retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    match value.parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => Some(date(value)?.duration_since(now).unwrap_or_default()),
    }
}

/// `Wed, 21 Oct 2015 07:28:00 GMT`, the one form of date that HTTP lets a server write.
fn date(text: &str) -> Option<SystemTime> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let [_, day, month, year, time, "GMT"] = words.as_slice() else { return None };
    let number = |word: &str| word.parse::<u64>().ok();
    let month = 1 + MONTHS.iter().position(|name| name == month)? as u64;
    let time: Vec<u64> = time.split(':').map(number).collect::<Option<_>>()?;
    let (day, year) = (number(day)?, number(year)?);
    let [hour, minute, second] = time.as_slice() else { return None };
    let is_possible = (1970..10_000).contains(&year) && (1..=31).contains(&day) && *hour < 24 && *minute < 60;
    let seconds = || days_since_1970(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second.min(&60);
    is_possible.then(|| UNIX_EPOCH + Duration::from_secs(seconds()))
}

/// Years begin with March here, so that the leap day is the last one.
fn days_since_1970(year: u64, month: u64, day: u64) -> u64 {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 719_469
}

#[cfg(test)]
mod tests {
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
