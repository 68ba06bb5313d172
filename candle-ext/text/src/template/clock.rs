//! The time a template may print (`strftime_now`): the machine's clock, or a fixed one, so that
//! a run's data do not depend on the day it was started.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// Where a template's date comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Clock {
    /// The system's clock, in UTC.
    #[default]
    System,
    /// Always this moment, in seconds since 1970-01-01 UTC.
    Fixed(i64),
}

impl Clock {
    /// Formats the current moment as C's `strftime` does in the C locale. A directive that is not
    /// known is an error that names it.
    pub fn format(self, format: &str) -> Result<String, char> {
        let seconds = match self {
            Clock::Fixed(seconds) => seconds,
            Clock::System => {
                SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs().cast_signed())
            }
        };
        Moment::from_unix(seconds).format(format)
    }
}

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
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
    year: i64,
    /// From 1.
    month: i64,
    day: i64,
    day_of_year: i64,
    /// 0 is Sunday.
    weekday: i64,
    second_of_day: i64,
    unix: i64,
}

impl Moment {
    fn from_unix(unix: i64) -> Self {
        let days = unix.div_euclid(86_400);
        let (year, day_of_year) = year_of(days);
        let (mut month, mut day) = (1, day_of_year);
        while day > days_in(year, month) {
            day -= days_in(year, month);
            month += 1;
        }
        Self {
            year,
            month,
            day,
            day_of_year,
            weekday: (days + 4).rem_euclid(7),
            second_of_day: unix.rem_euclid(86_400),
            unix,
        }
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
        let hour = self.second_of_day / 3600;
        let hour_of_12 = if hour % 12 == 0 { 12 } else { hour % 12 };
        let mut number = |value: i64, width: usize| {
            let width = if padded { width } else { 0 };
            write!(out, "{value:0width$}").expect("writing to a String does not fail");
        };
        match directive {
            'Y' => number(self.year, 4),
            'm' => number(self.month, 2),
            'd' => number(self.day, 2),
            'e' => write!(out, "{:2}", self.day).expect("writing to a String does not fail"),
            'y' => number(self.year.rem_euclid(100), 2),
            'j' => number(self.day_of_year, 3),
            'H' => number(hour, 2),
            'I' => number(hour_of_12, 2),
            'M' => number(self.second_of_day / 60 % 60, 2),
            'S' => number(self.second_of_day % 60, 2),
            'f' => number(0, 6),
            'u' => number((self.weekday + 6) % 7 + 1, 1),
            'w' => number(self.weekday, 1),
            's' => number(self.unix, 1),
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
            // As Python prints them for a time without a zone.
            'Z' | 'z' => {}
            'n' => out.push('\n'),
            't' => out.push('\t'),
            '%' => out.push('%'),
            unknown => return Err(unknown),
        }
        Ok(())
    }

    fn weekday_name(&self) -> &'static str {
        usize::try_from(self.weekday).map_or("", |weekday| DAYS[weekday])
    }

    fn month_name(&self) -> &'static str {
        usize::try_from(self.month - 1).map_or("", |month| MONTHS[month])
    }
}

/// The year of a day counted from 1970-01-01, and which day of it that is, from 1.
fn year_of(days: i64) -> (i64, i64) {
    // Days of the proleptic Gregorian calendar before the first of January of a year.
    let before = |year: i64| {
        let years = year - 1;
        years * 365 + years.div_euclid(4) - years.div_euclid(100) + years.div_euclid(400)
    };
    let days = days + before(1970);
    let mut year = days * 400 / 146_097 + 1;
    while before(year) > days {
        year -= 1;
    }
    while before(year + 1) <= days {
        year += 1;
    }
    (year, days - before(year) + 1)
}

fn days_in(year: i64, month: i64) -> i64 {
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    match month {
        2 if is_leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
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
