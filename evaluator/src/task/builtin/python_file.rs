//! Check that a task's Python file equals lm-eval's.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_regular_file};
use sha2::{Digest, Sha256};

use crate::task::error::ConfigError;
use crate::task::function::PythonFunction;

/// Python files of lm-eval 0.4.13, with the SHA-256 of their bytes.
const KNOWN: [(&str, &str); 16] = [
    ("hellaswag/utils", "07d23b60b28f2a4f658dcf8440623a63fe6644854ce9b846a114dde980dc1214"),
    ("winogrande/preprocess_winogrande", "e55327629264a98f1d383fda24645b6779afb53fa0bce2150042b9416b1ae006"),
    ("wikitext/preprocess_wikitext", "a44020374b172159bf5be80a64d2c4194c9d5c77284f696ac666361338c8da7d"),
    ("truthfulqa/utils", "d3c827d1e2cd442a1e4738b527a18effd48cbb2aed478c12a652311b5ea4dbc8"),
    ("ifeval/utils", "1ab8f14808c826f93f2364883487ed63cf4267980bf4761fda8053899c013632"),
    ("humaneval/utils", "5f77adbf75b4342a6113fea30168ea57b4e5c3877ffd3b4942cb338b3edb2c95"),
    ("gpqa/n_shot/utils", "8c70526cdc0f32811cd4cd35db6983561583980b4b7552c3484dc6846b41e241"),
    ("gpqa/zeroshot/utils", "7c755f2c3f8f4ac20de96fb68941c43424d2ded0552d5ab81e672e15c410655c"),
    ("gpqa/cot_zeroshot/utils", "b603828710f1fb3e1b8fe42726b188544ef8dbd12d25f4ca676e42ca4d1a251b"),
    ("leaderboard/gpqa/utils", "21901ae19d06c75c1490026f98be390e8b522b1d0d7cdce4f77740b344072883"),
    ("leaderboard/mmlu_pro/utils", "49a014c4dc39902071760182858e6b4d42aaaa917a440e71a165bdff75085487"),
    ("leaderboard/musr/utils", "9da42ec170310d8eaac3964994eb02d150e52e0f4514553e395c2a3174c25dd4"),
    ("leaderboard/math/utils", "07950dcc102f8d3892c6acea62f5b3499a579aee4c5f8e9af6b94c84c43d16b9"),
    ("mmlu_pro/utils", "d47eae06ecf1e9535b033394de62185327a1dca977cb29049003699adeb92801"),
    ("hendrycks_math/utils", "8332e42f23c62043b23d74ee6d3934f997b209cd60a1ad45b7882d6b00929d5c"),
    ("bbh/zeroshot/utils", "ecc017c5c3c0a03757d94072fb74feac74406b63d2f6efa6ec68f73f8db8a9fd"),
];

static IS_ALLOWED: AtomicBool = AtomicBool::new(false);

/// Allows built-in implementations for modified Python files, for the rest of the process.
pub fn allow_modified_python() {
    IS_ALLOWED.store(true, Ordering::Relaxed);
}

/// Returns an error if the Python file of `function` exists and differs from lm-eval 0.4.13, because the built-in
/// implementation may then compute something else. After [`allow_modified_python`] it is a warning.
pub(super) fn check(function: &PythonFunction, built_in: &str) -> Result<(), ConfigError> {
    let Some((path, _)) = function.name.rsplit_once('.') else { return Ok(()) };
    let module = built_in.rsplit_once('.').map_or(built_in, |(module, _)| module);
    let Some((_, known)) = KNOWN.iter().find(|(name, _)| *name == module) else { return Ok(()) };
    let Ok(bytes) = read_regular_file(&Path::new(path).with_extension("py"), MAX_CONFIG_FILE_BYTES) else {
        return Ok(());
    };
    if hex(&Sha256::digest(&bytes)) == *known {
        return Ok(());
    }
    let problem = format!(
        "{path}.py differs from lm-eval 0.4.13; the built-in implementation of {built_in} may compute something else"
    );
    if IS_ALLOWED.load(Ordering::Relaxed) {
        tracing::warn!("{problem}");
        return Ok(());
    }
    Err(ConfigError::at(function.place.clone(), problem)
        .with_remedy("remove the file, or allow it with --allow-changed-python"))
}

/// Formats bytes as lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
