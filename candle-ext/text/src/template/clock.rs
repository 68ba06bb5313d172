//! Clock for `strftime_now` in templates: the system's, or a fixed one for reproducible data.

use std::fmt::Write;

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

/// Time source of a template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Clock {
    /// System clock, in UTC.
    #[default]
    System,
    /// Fixed time, in seconds since 1970-01-01 UTC.
    Fixed(i64),
}

impl Clock {
    /// Formats the current time like C's `strftime` in the C locale. The error is an unknown directive.
    pub fn format(self, format: &str) -> Result<String, char> {
        let seconds = match self {
            Clock::Fixed(seconds) => seconds,
            Clock::System => Timestamp::now().as_second(),
        };
        Moment::from_unix(seconds).format(format)
    }
}

const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

struct Moment {
    unix: i64,
    utc: DateTime,
}

impl Moment {
    /// Returns the time `unix` seconds after 1970, limited to years of four digits.
    fn from_unix(unix: i64) -> Self {
        let (first, last) = (Timestamp::MIN, Timestamp::MAX);
        let timestamp = Timestamp::from_second(unix).unwrap_or(if unix < 0 { first } else { last });
        Self { unix, utc: TimeZone::UTC.to_datetime(timestamp) }
    }

    fn format(&self, format: &str) -> Result<String, char> {
        let mut out = String::new();
        let mut letters = format.chars();
        while let Some(letter) = letters.next() {
            if letter != '%' {
                out.push(letter);
                continue;
            }
            let mut directive = letters.next().unwrap_or('%');
            let padded = directive != '-';
            if !padded {
                directive = letters.next().unwrap_or('%');
            }
            self.write(&mut out, directive, padded)?;
        }
        Ok(out)
    }

    fn write(&self, out: &mut String, directive: char, padded: bool) -> Result<(), char> {
        let Self { unix, utc } = self;
        let hour = i64::from(utc.hour());
        let hour_of_12 = if hour % 12 == 0 { 12 } else { hour % 12 };
        let mut number = |value: i64, width: usize| {
            let width = if padded { width } else { 0 };
            write!(out, "{value:0width$}").expect("writing to a String does not fail");
        };
        match directive {
            'Y' => number(utc.year().into(), 4),
            'm' => number(utc.month().into(), 2),
            'd' => number(utc.day().into(), 2),
            'e' => write!(out, "{:2}", utc.day()).expect("writing to a String does not fail"),
            'y' => number(i64::from(utc.year()).rem_euclid(100), 2),
            'j' => number(utc.day_of_year().into(), 3),
            'H' => number(hour, 2),
            'I' => number(hour_of_12, 2),
            'M' => number(utc.minute().into(), 2),
            'S' => number(utc.second().into(), 2),
            'f' => number(0, 6),
            'u' => number(utc.weekday().to_monday_one_offset().into(), 1),
            'w' => number(utc.weekday().to_sunday_zero_offset().into(), 1),
            's' => number(*unix, 1),
            'p' => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            'a' => out.push_str(&self.weekday_name()[..3]),
            'A' => out.push_str(self.weekday_name()),
            'b' | 'h' => out.push_str(&self.month_name()[..3]),
            'B' => out.push_str(self.month_name()),
            'F' => out.push_str(&self.format("%Y-%m-%d")?),
            'T' | 'X' => out.push_str(&self.format("%H:%M:%S")?),
            'R' => out.push_str(&self.format("%H:%M")?),
            'D' | 'x' => out.push_str(&self.format("%m/%d/%y")?),
            'c' => out.push_str(&self.format("%a %b %e %H:%M:%S %Y")?),
            // Empty, as in Python for a time without a zone.
            'Z' | 'z' => {}
            'n' => out.push('\n'),
            't' => out.push('\t'),
            '%' => out.push('%'),
            unknown => return Err(unknown),
        }
        Ok(())
    }

    fn weekday_name(&self) -> &'static str {
        DAYS[self.utc.weekday().to_monday_zero_offset() as usize]
    }

    fn month_name(&self) -> &'static str {
        MONTHS[self.utc.month() as usize - 1]
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(unix: i64, format: &str, want: &str) {
        assert_eq!(Clock::Fixed(unix).format(format).unwrap(), want);
    }

    #[test]
    fn dates_print_as_in_python() {
        check(0, "%d %b %Y", "01 Jan 1970");
        check(1_721_952_000, "%A, %B %-d, %Y %j", "Friday, July 26, 2024 208");
        check(1_709_164_799, "%Y-%m-%d %H:%M:%S %p %I", "2024-02-28 23:59:59 PM 11");
        check(1_709_164_800, "%F %T %%", "2024-02-29 00:00:00 %");
        check(1_735_603_200, "%e|%y|%a", "31|24|Tue");
        check(-1, "%c", "Wed Dec 31 23:59:59 1969");
    }

    #[test]
    fn an_unknown_directive_is_named() {
        assert_eq!(Clock::Fixed(0).format("%d %Q"), Err('Q'));
    }
}
