//! Whether the Python file beside a task is the one that a twin was written after.

use std::path::Path;

use sha2::{Digest, Sha256};

use crate::task::config::Function;

/// The files of lm-eval 0.4.13, by the SHA-256 of their bytes.
const KNOWN: [(&str, &str); 12] = [
    ("hellaswag/utils", "07d23b60b28f2a4f658dcf8440623a63fe6644854ce9b846a114dde980dc1214"),
    ("winogrande/preprocess_winogrande", "e55327629264a98f1d383fda24645b6779afb53fa0bce2150042b9416b1ae006"),
    ("wikitext/preprocess_wikitext", "a44020374b172159bf5be80a64d2c4194c9d5c77284f696ac666361338c8da7d"),
    ("truthfulqa/utils", "d3c827d1e2cd442a1e4738b527a18effd48cbb2aed478c12a652311b5ea4dbc8"),
    ("ifeval/utils", "1ab8f14808c826f93f2364883487ed63cf4267980bf4761fda8053899c013632"),
    ("humaneval/utils", "5f77adbf75b4342a6113fea30168ea57b4e5c3877ffd3b4942cb338b3edb2c95"),
    ("gpqa/n_shot/utils", "8c70526cdc0f32811cd4cd35db6983561583980b4b7552c3484dc6846b41e241"),
    ("gpqa/zeroshot/utils", "7c755f2c3f8f4ac20de96fb68941c43424d2ded0552d5ab81e672e15c410655c"),
    ("gpqa/cot_zeroshot/utils", "b603828710f1fb3e1b8fe42726b188544ef8dbd12d25f4ca676e42ca4d1a251b"),
    ("mmlu_pro/utils", "d47eae06ecf1e9535b033394de62185327a1dca977cb29049003699adeb92801"),
    ("hendrycks_math/utils", "8332e42f23c62043b23d74ee6d3934f997b209cd60a1ad45b7882d6b00929d5c"),
    ("bbh/zeroshot/utils", "ecc017c5c3c0a03757d94072fb74feac74406b63d2f6efa6ec68f73f8db8a9fd"),
];

/// Says so if the file that holds `function` is there and is another than that of lm-eval 0.4.13.
pub(super) fn warn_if_changed(function: &Function, twin: &str) {
    let Some((path, _)) = function.name.rsplit_once('.') else { return };
    let module = twin.rsplit_once('.').map_or(twin, |(module, _)| module);
    let Some((_, known)) = KNOWN.iter().find(|(name, _)| *name == module) else { return };
    let Ok(bytes) = std::fs::read(Path::new(path).with_extension("py")) else { return };
    if hex(&Sha256::digest(&bytes)) != *known {
        tracing::warn!("{path}.py is not that of lm-eval 0.4.13; the native twin {twin} may do something else");
    }
}

/// Bytes as lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
