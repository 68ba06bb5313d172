//! I/O errors inside of candle's errors.

use std::error::Error as StdError;
use std::io;

use candle_core::Error;

/// Returns the I/O error of a candle error. `source` does not return it: that variant is transparent.
pub fn io_cause<'e>(error: &'e (dyn StdError + 'static)) -> Option<&'e io::Error> {
    match error.downcast_ref::<Error>()? {
        Error::Io(error) => Some(error),
        Error::WrappedContext { wrapped, .. } => wrapped.downcast_ref(),
        Error::Context { inner, .. } | Error::WithPath { inner, .. } | Error::WithBacktrace { inner, .. } => {
            io_cause(&**inner)
        }
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::error::Context as _;

    use super::*;

    #[test]
    fn the_io_error_is_found_below_every_layer() {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let wrapped: candle_core::Result<()> = Err(full()).context("save");
        for error in [
            Error::from(full()),
            Error::from(full()).bt(),
            Error::from(full()).context("save").with_path("/big"),
            wrapped.unwrap_err(),
        ] {
            assert_eq!(io_cause(&error).map(io::Error::kind), Some(io::ErrorKind::StorageFull), "{error}");
        }
        assert!(io_cause(&Error::Msg("something".to_owned())).is_none());
        assert!(io_cause(&full()).is_none());
    }
}
