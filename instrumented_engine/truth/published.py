"""What public traces say of lengths and arrivals, as numbers: used where the traces themselves are not at hand.

Quantiles of prompt and output tokens at `LEVELS`, computed from the files named by `Published.source`; coefficients of variation
(standard deviation over mean) of the gaps between arrivals. Data only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LEVELS = (0.0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Published:
    """Quantiles of one trace at LEVELS, in tokens of its own model's tokenizer, and where they come from."""

    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    source: str


_AZURE = "Azure/AzurePublicDataset AzureLLMInferenceTrace 2023 (CC-BY-4.0; Patel et al., Splitwise, ISCA 2024)"
_MOONCAKE = "kvcache-ai/Mooncake FAST25-release (Apache-2.0)"
_SERVEGEN = "alibaba/ServeGen, first day, clients weighted by their rate (Apache-2.0)"

PUBLISHED: Mapping[str, Published] = {
    "azure_conv": Published(
        (2, 31, 181, 220, 396, 1015, 1204, 4074, 4085, 4121, 14050),
        (7, 16, 39, 50, 81, 115, 393, 421, 448, 598, 1000),
        f"{_AZURE}, conv, first 40 minutes",
    ),
    "azure_code": Published(
        (3, 16, 75, 147, 577, 1463, 2705, 5009, 7328, 7436, 7437),
        (6, 6, 6, 7, 9, 13, 23, 55, 87, 251, 1899),
        f"{_AZURE}, code, first 35 minutes",
    ),
    "mooncake_conversation": Published(
        (891, 894, 901, 974, 2414, 7284, 15694, 27991, 40369, 89868, 124847),
        (1, 3, 10, 24, 155, 356, 476, 606, 712, 1168, 2000),
        f"{_MOONCAKE}, conversation, first 40 minutes",
    ),
    "mooncake_synthetic": Published(
        (13, 14, 20, 25, 71, 5960, 20631, 36864, 42948, 57503, 191374),
        (1, 2, 2, 4, 14, 131, 295, 436, 568, 776, 842),
        f"{_MOONCAKE}, synthetic, first 2,662 rows",
    ),
    "arxiv": Published(
        (1, 72, 734, 1224, 1977, 2716, 3362, 3701, 3815, 3934, 4046),
        (5, 37, 60, 79, 115, 167, 242, 372, 766, 3287, 4056),
        "microsoft/vidur processed arXiv summarization lengths, first 18,838 rows (MIT)",
    ),
    "servegen_large": Published(
        (2, 61, 72, 74, 76, 581, 829, 965, 1556, 3249, 30644),
        (1, 1, 1, 3, 15, 49, 427, 467, 488, 617, 9307),
        f"{_SERVEGEN}, m-large",
    ),
    "servegen_small": Published(
        (10, 13, 14, 21, 40, 51, 77, 440, 600, 1484, 145912),
        (1, 1, 1, 1, 2, 4, 38, 78, 124, 223, 10912),
        f"{_SERVEGEN}, m-small",
    ),
    "deepseek_r1": Published(
        (4, 9, 13, 18, 41, 208, 482, 2092, 6714, 23423, 57284),
        (9, 141, 225, 287, 427, 792, 1499, 3432, 5701, 12607, 32768),
        f"{_SERVEGEN}, deepseek-r1",
    ),
}

# Gaps between arrivals. Azure conv is Poisson within 5 minutes; Azure code 12.8 over 35 minutes; a ServeGen client's
# 10-minute window has 1.2, 5.0 and 13 at its 50th, 90th and 99th percentile (clients of m-large).
AZURE_CODE_CV = 12.8
SERVEGEN_CV_QUANTILES = ((0.05, 0.4), (0.25, 0.93), (0.5, 1.16), (0.75, 2.06), (0.9, 5.0), (0.99, 13.3))
# Mooncake conversation: requests whose prompt continues an earlier one beyond the common first block, and the tokens of a block.
MOONCAKE_REUSE_RATIO = 0.372
MOONCAKE_BLOCK_TOKENS = 512
