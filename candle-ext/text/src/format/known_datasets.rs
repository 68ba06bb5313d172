//! Column and split names of well-known Hub data sets.

/// Returns the role mapping of a well-known data set: pairs of role and column path, in message order.
pub fn known_role_mapping(id: &str) -> Option<&'static [(&'static str, &'static str)]> {
    const MESSAGES: &[(&str, &str)] = &[("user", "messages.role.user"), ("assistant", "messages.role.assistant")];
    Some(match id {
        "HuggingFaceH4/ultrachat_200k" | "THUDM/LongAlign-10k" => MESSAGES,
        // The messages end with the question; the answer is a separate column.
        "nvidia/AceMath-Instruct-Training-Data" => {
            &[("user", "messages.role.user"), ("assistant", "messages.role.assistant"), ("assistant", "answer")]
        }
        "Open-Orca/OpenOrca" => &[("system", "system_prompt"), ("user", "question"), ("assistant", "response")],
        "Open-Orca/SlimOrca" => &[
            ("system", "conversations.from.system"),
            ("user", "conversations.from.human"),
            ("assistant", "conversations.from.gpt"),
        ],
        "Yukang/LongAlpaca-12k" => &[("user", "instruction"), ("assistant", "output")],
        "meta-math/MetaMathQA" => &[("user", "query"), ("assistant", "response")],
        "ise-uiuc/Magicoder-OSS-Instruct-75K" => &[("user", "problem"), ("assistant", "solution")],
        "lmsys/lmsys-chat-1m" => &[("user", "conversation.role.user"), ("assistant", "conversation.role.assistant")],
        _ => return None,
    })
}

/// Returns pairs of `train` or `eval` and the name of that split in a well-known data set.
pub fn known_split_mapping(id: &str) -> &'static [(&'static str, &'static str)] {
    match id {
        "HuggingFaceH4/ultrachat_200k" => &[("train", "train_sft"), ("eval", "test_sft")],
        "HuggingFaceH4/ultrafeedback_binarized" => &[("train", "train_prefs"), ("eval", "test_prefs")],
        "nvidia/AceMath-Instruct-Training-Data" => &[("train", "general_sft_stage2")],
        _ => &[],
    }
}
