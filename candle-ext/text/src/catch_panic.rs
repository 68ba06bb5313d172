//! Conversion of panics in other crates, on malformed files, to errors.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs `run` and returns the panic message as an error if it panics. Suppresses the message on stderr.
pub(crate) fn catch_panic<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    hush_once();
    let before = IS_QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(run));
    IS_QUIET.set(before);
    result.map_err(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
    })
}

/// Installs a panic hook that is silent within [`catch_panic`].
fn hush_once() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IS_QUIET.get() {
                print(info);
            }
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_its_message() {
        assert_eq!(catch_panic(|| 3), Ok(3));
        assert_eq!(catch_panic(|| panic!("no {}", "entry")), Err::<(), _>("no entry".to_owned()));
        assert!(!IS_QUIET.get());
    }
}
