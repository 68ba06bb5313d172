//! The lists of the prose test: forbidden openings, banned phrases and exceptions.

/// Openings that turn a doc comment into a relative clause. Begin with a verb in the third person or a noun phrase.
pub(super) const FORBIDDEN_OPENINGS: &[&str] = &[
    "what", "how", "whether", "where", "which", "who", "whose", "when", "whoever", "whatever", "those", "of", "so",
    "the same",
];

/// The longest sentence of a document or a doc comment, in words.
pub(super) const MAX_WORDS: usize = 30;

/// Banned phrases, each with a replacement. Forms of a word are separated by `|`.
pub(super) const BANNED: &[(&str, &str)] = &[
    ("tell|tells|told|telling", "report, distinguish, show"),
    ("ask|asks|asked|asking", "request, query, read"),
    ("hear|hears|heard", "receive"),
    ("blame|blames|blamed|accuse|accuses", "report as the cause"),
    ("meet|meets|meeting", "rendezvous, match"),
    ("bury|buries|buried", "reap"),
    ("hire|hired|hires", "spawn"),
    ("park|parks|parked|parking", "offload"),
    ("put off|puts off|putting off", "defer"),
    ("take up|takes up|taken up|took up", "resume, read"),
    ("at hand", "available"),
    ("at work", "busy, in progress"),
    ("sign of life|signs of life", "heartbeat"),
    ("room|rooms", "memory, space, crate"),
    ("wall|walls", "layer boundary"),
    ("aloud", "logged"),
    ("judge|judges|judged|verdict|verdicts", "decide, decision"),
    ("voice|crew|seat|seats|stranger|strangers", "the field's noun"),
    ("speak|speaks|spoken", "use, implement"),
    ("lie|lies|lied", "corrupt, be, point to"),
    ("nobody|somebody|anybody|whoever", "the agent"),
    ("behind", "after"),
    ("beside", "next to, compared with"),
    ("number format|number formats", "dtype"),
    ("key heads", "KV heads"),
    ("in parts", "sharded"),
    ("so many", "a count"),
    ("product|products", "matmul, GEMM"),
    (
        "a save|the save|this save|that save|each save|every save|last save|sharded save|saves of|two saves",
        "checkpoint",
    ),
    ("its share|a share|their share|own share|shares of", "shard"),
    ("is said|are said|said so|says so", "is logged"),
    ("go back|goes back|going back|gone back|went back", "run backward, return"),
    ("go on|goes on|going on|went on", "continue"),
    ("comes to|come to|came to", "is, amounts to"),
    ("do not fall into|does not fall into", "cannot be divided by"),
    ("of before", "previous"),
    ("as it is then|a good one|done without", "the plain statement"),
];

/// Phrases that contain a banned word and are the field's terms.
pub(super) const ALLOWED: &[&str] = &[
    "dot product",
    "dot products",
    "inner product",
    "outer product",
    "outer products",
    "scalar product",
    "wall time",
    "wall clock",
    "memory wall",
    "speaker",
];

/// Passages that keep a banned phrase or a long sentence, by file and excerpt: quoted output of other programs, and licences.
pub(super) const EXCEPTIONS: &[(&str, &str)] = &[];
