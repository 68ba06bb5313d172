//! Formatting of numbers for people.

/// Formats seconds as `1.234s` below a minute, else as `H:MM:SS`.
pub fn duration(seconds: f64) -> String {
    if seconds < 59.9995 {
        return format!("{seconds:.3}s");
    }
    clock(seconds)
}

/// Formats seconds as `H:MM:SS`.
pub fn clock(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// Formats a count with a decimal unit: `999`, `32.00K`, `1.50M`.
pub fn quantity(value: f64) -> String {
    const UNITS: [&str; 5] = ["", "K", "M", "G", "T"];
    let mut scaled = value;
    let mut unit = 0;
    while scaled.abs() >= 999.995 && unit + 1 < UNITS.len() {
        scaled /= 1000.0;
        unit += 1;
    }
    let is_integer = unit == 0 && scaled.fract() == 0.0;
    let digits = if is_integer { 0 } else { 2 };
    format!("{scaled:.digits$}{}", UNITS[unit])
}

/// Formats a learning rate with a two-digit exponent: `1.000E-05`.
pub(super) fn exponent(value: f64) -> String {
    let text = format!("{value:.3E}");
    let Some((mantissa, power)) = text.split_once('E') else { return text };
    let (sign, digits) = power.strip_prefix('-').map_or(("+", power), |digits| ("-", digits));
    format!("{mantissa}E{sign}{digits:0>2}")
}

/// Formats TFLOPS, with three decimals below 1.
pub(super) fn tflops(value: f64) -> String {
    if value < 1.0 { format!("{value:.3}") } else { format!("{value:.1}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        let cases = [
            (0.0, "0.000s"),
            (1.2341, "1.234s"),
            (59.9994, "59.999s"),
            (59.9996, "0:01:00"),
            (60.0, "0:01:00"),
            (3661.4, "1:01:01"),
            (360_000.0, "100:00:00"),
        ];
        for (seconds, want) in cases {
            assert_eq!(duration(seconds), want);
        }
    }

    #[test]
    fn quantities() {
        let cases = [
            (0.0, "0"),
            (7.25, "7.25"),
            (999.0, "999"),
            (999.996, "1.00K"),
            (32_000.0, "32.00K"),
            (1.5e6, "1.50M"),
            (2e15, "2000.00T"),
        ];
        for (value, want) in cases {
            assert_eq!(quantity(value), want);
        }
    }

    #[test]
    fn learning_rates_and_tflops() {
        assert_eq!(exponent(1e-5), "1.000E-05");
        assert_eq!(exponent(0.0), "0.000E+00");
        assert_eq!(exponent(1.5e-100), "1.500E-100");
        assert_eq!(exponent(f64::NAN), "NaN");
        assert_eq!(tflops(0.0519), "0.052");
        assert_eq!(tflops(512.04), "512.0");
    }
}
