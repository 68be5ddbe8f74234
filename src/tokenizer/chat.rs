//! From a conversation to ids, such that nothing a message says can become a control token.
//!
//! The template decides what its text means, so contents cannot simply be cut out and put back:
//! templates trim them, split them at `</think>`, or look for `<tool_response>`. Instead two
//! renderings are made, both with one private-use character, not otherwise present, in place of
//! each dangerous part; a single character survives trimming and slicing whole.
//!
//! - *Faithful*: only complete control tokens in the contents are replaced, so the template sees
//!   nearly everything. A template that joins or cuts contents might still assemble a control token.
//! - *Strict*: every character that could begin a control token is replaced. No control token of
//!   the rendered text can come from a content.
//!
//! If both hold the same sequence of control tokens, the faithful one is safe and is used; else the
//! strict one is. The rendered text is cut at its control tokens, the rest gets its replaced parts
//! back and is encoded as plain text.

use std::collections::{HashMap, HashSet};

use super::special::{Matcher, Part};
use super::{ChatTemplate, Message, Special, TemplateArgs, Tokenizer};
use crate::{Error, Result};

impl Tokenizer {
    /// Arguments for a template, with this vocabulary's BOS and EOS.
    pub fn template_args(&self, add_generation_prompt: bool) -> TemplateArgs {
        let text = |id: Option<u32>| id.and_then(|id| self.token_str(id)).unwrap_or_default();
        TemplateArgs {
            add_generation_prompt,
            bos_token: text(self.bos()).to_owned(),
            eos_token: text(self.eos()).to_owned(),
            ..TemplateArgs::default()
        }
    }

    /// The ids of a conversation: the template's control tokens are parsed, those that messages or
    /// `args.extra` write out are plain text. Starts with exactly one BOS if [`Self::add_bos`].
    pub fn encode_chat(
        &self,
        template: &ChatTemplate,
        messages: &[Message],
        args: &TemplateArgs,
    ) -> Result<Vec<u32>> {
        let free = free_characters(template, messages, args);
        let faithful = self.render(template, messages, args, Shield::new(&free, Hide::Tokens))?;
        let strict = self.render(template, messages, args, Shield::new(&free, Hide::Beginnings))?;
        let same = self.control.ids(&faithful.text) == self.control.ids(&strict.text);
        let mut ids = self.encode_rendered(if same { &faithful } else { &strict })?;
        if let Some(bos) = self.bos().filter(|bos| self.add_bos() && ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    fn render(
        &self,
        template: &ChatTemplate,
        messages: &[Message],
        args: &TemplateArgs,
        mut shield: Shield<'_>,
    ) -> Result<Rendered> {
        let mut shielded = Vec::with_capacity(messages.len());
        for message in messages {
            // Roles are compared by templates: only what no role is called is replaced.
            let is_word = message.role.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            let role = if is_word {
                message.role.clone()
            } else {
                shield.hide(&message.role, &self.control)?
            };
            shielded.push(Message { role, content: shield.hide(&message.content, &self.control)? });
        }
        let mut args = args.clone();
        for value in args.extra.values_mut() {
            shield.hide_json(value, &self.control)?;
        }
        Ok(Rendered { text: template.render(&shielded, &args)?, hidden: shield.hidden })
    }

    fn encode_rendered(&self, rendered: &Rendered) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for part in self.control.split(&rendered.text) {
            match part {
                Part::Token(id) => ids.push(id),
                Part::Text(text) => {
                    ids.extend(self.encode(&rendered.restore(text), Special::Plain)?);
                }
            }
        }
        Ok(ids)
    }
}

/// A template's output and what its replacement characters stand for.
struct Rendered {
    text: String,
    hidden: HashMap<char, String>,
}

impl Rendered {
    fn restore(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        for c in text.chars() {
            match self.hidden.get(&c) {
                Some(original) => out.push_str(original),
                None => out.push(c),
            }
        }
        out
    }
}

/// What a [`Shield`] replaces.
#[derive(Clone, Copy)]
enum Hide {
    Tokens,
    Beginnings,
}

/// Replaces dangerous parts of texts, each distinct part by its own character.
struct Shield<'f> {
    free: std::slice::Iter<'f, char>,
    what: Hide,
    by_text: HashMap<String, char>,
    hidden: HashMap<char, String>,
}

impl<'f> Shield<'f> {
    fn new(free: &'f [char], what: Hide) -> Self {
        Shield { free: free.iter(), what, by_text: HashMap::new(), hidden: HashMap::new() }
    }

    fn hide(&mut self, text: &str, control: &Matcher) -> Result<String> {
        let mut out = String::with_capacity(text.len());
        match self.what {
            Hide::Tokens => {
                let mut end = 0;
                for (start, len, _) in control.matches(text) {
                    out.push_str(&text[end..start]);
                    end = start + len;
                    out.push(self.character_for(&text[start..end])?);
                }
                out.push_str(&text[end..]);
            }
            Hide::Beginnings => {
                for c in text.chars() {
                    let dangerous = control.may_start_with(c);
                    out.push(if dangerous { self.character_for(&c.to_string())? } else { c });
                }
            }
        }
        Ok(out)
    }

    fn hide_json(&mut self, value: &mut serde_json::Value, control: &Matcher) -> Result<()> {
        match value {
            serde_json::Value::String(text) => *text = self.hide(text, control)?,
            serde_json::Value::Array(items) => {
                for item in items {
                    self.hide_json(item, control)?;
                }
            }
            serde_json::Value::Object(map) => {
                for (key, mut value) in std::mem::take(map) {
                    self.hide_json(&mut value, control)?;
                    // Names that templates look up contain no control token.
                    map.insert(self.hide_key(key, control)?, value);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn hide_key(&mut self, key: String, control: &Matcher) -> Result<String> {
        let is_word = key.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '$'));
        if is_word { Ok(key) } else { self.hide(&key, control) }
    }

    fn character_for(&mut self, text: &str) -> Result<char> {
        if let Some(&c) = self.by_text.get(text) {
            return Ok(c);
        }
        let &c = self.free.next().ok_or_else(|| {
            let problem = "the messages use every private-use character and many control tokens";
            Error::Tokenizer(problem.to_owned())
        })?;
        self.by_text.insert(text.to_owned(), c);
        self.hidden.insert(c, text.to_owned());
        Ok(c)
    }
}

/// Private-use characters that appear neither in the template nor in anything it is given.
fn free_characters(
    template: &ChatTemplate,
    messages: &[Message],
    args: &TemplateArgs,
) -> Vec<char> {
    let private = '\u{F0000}'..='\u{FFFFD}';
    let mut used = HashSet::new();
    let mut note = |text: &str| used.extend(text.chars().filter(|c| private.contains(c)));
    note(template.source());
    note(&args.bos_token);
    note(&args.eos_token);
    for message in messages {
        note(&message.role);
        note(&message.content);
    }
    note(&serde_json::Value::Object(args.extra.clone()).to_string());
    private.clone().filter(|c| !used.contains(c)).collect()
}
