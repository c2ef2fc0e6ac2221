"""The equation of every baseline's own paper as slow loops over lists: what the objectives are held against.

Vectors are unit rows, so a cosine is a product. What a paper holds still is detached here.
"""

from __future__ import annotations

from torch import Tensor

from cmsf.method.losses import (
    EXTRA,
    FIRST,
    ISD,
    NNCLR,
    PAWS,
    SECOND,
    SUPPORT,
    CrossEntropy,
    FixMatch,
    InfoNCE,
    LossInput,
    Prototypes,
    SimCLR,
    SimSiam,
    SupCon,
    SymmetricBYOL,
)
from cmsf.utils.constants import UNKNOWN


def mean(values: list[Tensor]) -> Tensor:
    return sum(values) / len(values)


def softmax(scores: list[Tensor]) -> list[Tensor]:
    exps = [score.exp() for score in scores]
    return [each / sum(exps) for each in exps]


def cross_entropy(target: list[Tensor], chance: list[Tensor]) -> Tensor:
    """H(t, p) = −Σ_c t_c log p_c."""
    return -sum(t * p.log() for t, p in zip(target, chance, strict=True))


def length(vector: Tensor) -> Tensor:
    return sum(x * x for x in vector).sqrt()


def existing(step: LossInput) -> list[int]:
    return [j for j, image in enumerate(step.bank.index.tolist()) if image != UNKNOWN]


def of_other_images(step: LossInput, i: int) -> list[int]:
    return [j for j in existing(step) if int(step.bank.index[j]) != int(step.query.index[i])]


def labelled(step: LossInput) -> list[int]:
    return [i for i in range(len(step.query)) if int(step.query.label[i]) != UNKNOWN]


def info_nce(objective: InfoNCE, step: LossInput) -> Tensor:
    """He et al. 2020, eq. 1: −log exp(q·k₊/τ) / Σ_{i=0..K} exp(q·k_i/τ), over one positive and K negatives."""
    losses = []
    for i, q in enumerate(step.online[SECOND].embedding):
        positive = (q @ step.target[FIRST].embedding[i] / objective.temperature).exp()
        negative = [(q @ step.bank.embedding[j] / objective.temperature).exp() for j in of_other_images(step, i)]
        losses.append(-(positive / (positive + sum(negative))).log())
    return mean(losses)


def simclr(objective: SimCLR, step: LossInput) -> Tensor:
    """Chen et al. 2020, eq. 1 and Algorithm 1: z_{2k−1} and z_{2k} are the two views of image k."""
    z = []
    for first, second in zip(step.online[FIRST].embedding, step.online[SECOND].embedding, strict=True):
        z += [first, second]

    def loss(i: int, j: int) -> Tensor:
        rest = [(z[i] @ z[k] / objective.temperature).exp() for k in range(len(z)) if k != i]
        return -((z[i] @ z[j] / objective.temperature).exp() / sum(rest)).log()

    pairs = [(2 * k, 2 * k + 1) for k in range(len(z) // 2)]
    return sum(loss(i, j) + loss(j, i) for i, j in pairs) / len(z)


def nnclr(objective: NNCLR, step: LossInput) -> Tensor:
    """Dwibedi et al. 2021, eq. 3 and 4 and Algorithm 1: L(NN(z₁), p₂)/2 + L(NN(z₂), p₁)/2."""
    first, second = step.online[FIRST], step.online[SECOND]

    def neighbour(i: int, z: Tensor) -> Tensor:
        """arg min over q of ‖z − q‖₂."""
        candidates = [step.bank.embedding[j] for j in of_other_images(step, i)]
        return min(candidates, key=lambda q: float(length(z.detach() - q)))

    def loss(z: Tensor, prediction: Tensor) -> Tensor:
        losses = []
        for i in range(len(z)):
            scores = [neighbour(i, z[i]) @ p / objective.temperature for p in prediction]
            losses.append(-softmax(scores)[i].log())
        return mean(losses)

    return loss(first.embedding, second.prediction) / 2 + loss(second.embedding, first.prediction) / 2


def byol(objective: SymmetricBYOL, step: LossInput) -> Tensor:
    """Grill et al. 2020, eq. 2: ‖q̄(z) − z̄'‖², and the same with the views exchanged, added to it."""
    first, second = step.online[FIRST].prediction, step.online[SECOND].prediction
    losses = []
    for i in range(len(first)):
        there = length(first[i] - step.target[SECOND].embedding[i]) ** 2
        back = length(second[i] - step.target[FIRST].embedding[i]) ** 2
        losses.append(there + back)
    return mean(losses)


def simsiam(objective: SimSiam, step: LossInput) -> Tensor:
    """Chen and He 2021, eq. 4: D(p₁, stopgrad(z₂))/2 + D(p₂, stopgrad(z₁))/2, with D the negative cosine."""
    first, second = step.online[FIRST], step.online[SECOND]

    def distance(p: Tensor, z: Tensor) -> Tensor:
        return -(p @ z.detach()) / (length(p) * length(z.detach()))

    losses = []
    for i in range(len(step.query)):
        there = distance(first.prediction[i], second.embedding[i])
        back = distance(second.prediction[i], first.embedding[i])
        losses.append(there / 2 + back / 2)
    return mean(losses)


def isd(objective: ISD, step: LossInput) -> Tensor:
    """Tejankar et al. 2021, Sec. 3: KL of the teacher's similarities to the anchors to the student's."""
    losses = []
    for i, v in enumerate(step.online[SECOND].prediction):
        anchors = [step.bank.embedding[j] for j in of_other_images(step, i)]
        u = step.target[FIRST].embedding[i]
        teacher = softmax([u @ a / objective.target_temperature for a in anchors])
        student = softmax([v @ a / objective.temperature for a in anchors])
        losses.append(sum(t * (t / s).log() for t, s in zip(teacher, student, strict=True)))
    return mean(losses)


def supcon(objective: SupCon, step: LossInput) -> Tensor:
    """Khosla et al. 2020, eq. 2: the sum over positives outside of the logarithm. Theirs is a sum over i."""
    losses = []
    for i in labelled(step):
        z = step.online[SECOND].embedding[i]
        among = existing(step) if objective.include_target else of_other_images(step, i)
        alike = [j for j in among if int(step.bank.label[j]) == int(step.query.label[i])]
        if alike:
            total = sum((z @ step.bank.embedding[a] / objective.temperature).exp() for a in among)
            shares = [(z @ step.bank.embedding[p] / objective.temperature).exp() / total for p in alike]
            losses.append(-sum(share.log() for share in shares) / len(alike))
    return mean(losses)


def prototypes(objective: Prototypes, step: LossInput) -> Tensor:
    """Snell et al. 2017, eq. 1 and 2: c_k is the mean of a class, and the classes' scores are cosines over τ."""
    held: dict[int, list[Tensor]] = {}
    for j in existing(step):
        if int(step.bank.label[j]) != UNKNOWN:
            held.setdefault(int(step.bank.label[j]), []).append(step.bank.embedding[j])
    centres = {label: mean(rows) for label, rows in held.items()}
    losses = []
    for i in labelled(step):
        v = step.online[SECOND].prediction[i]
        exps = {label: (v @ c / length(c) / objective.temperature).exp() for label, c in centres.items()}
        losses.append(-(exps[int(step.query.label[i])] / sum(exps.values())).log())
    return mean(losses)


def named(objective: CrossEntropy, step: LossInput) -> Tensor:
    scores = step.online[SECOND].logits
    return mean([-softmax(list(scores[i]))[int(step.query.label[i])].log() for i in labelled(step)])


def paws(objective: PAWS, step: LossInput) -> Tensor:
    """Assran et al. 2021, eq. 1 to 4; the small crops' targets as in the authors' code."""
    label = step.support.label.tolist()
    classes = sorted(set(label))
    even = objective.smoothing / len(classes)
    smoothed = [[even + (1 - objective.smoothing) * (own == c) for c in classes] for own in label]

    def chances(z: Tensor, support: Tensor) -> list[Tensor]:
        weights = softmax([z @ s / objective.temperature for s in support])
        return [sum(w * y[c] for w, y in zip(weights, smoothed, strict=True)) for c in range(len(classes))]

    def sharpened(p: list[Tensor]) -> list[Tensor]:
        powers = [each ** (1 / objective.sharpening) for each in p]
        return [power / sum(powers) for power in powers]

    support, small = step.online[SUPPORT], range(EXTRA, EXTRA + objective.extra_crops)
    losses, every = [], []
    for i in range(len(step.query)):
        predicted = {
            v: chances(step.online[v].prediction[i], support.prediction) for v in (FIRST, SECOND, *small)
        }  # p_i, p_i⁺ and those of the small crops
        aim = {
            v: sharpened(chances(step.online[v].embedding[i].detach(), support.embedding.detach()))
            for v in (FIRST, SECOND)
        }
        losses += [cross_entropy(aim[SECOND], predicted[FIRST]), cross_entropy(aim[FIRST], predicted[SECOND])]
        middle = [(one + other) / 2 for one, other in zip(aim[FIRST], aim[SECOND], strict=True)]
        losses += [cross_entropy(middle, predicted[v]) for v in small]
        every += [sharpened(p) for p in predicted.values()]
    average = [mean([p[c] for p in every]) for c in range(len(classes))]
    return mean(losses) - cross_entropy(average, average)


def fixmatch(objective: FixMatch, step: LossInput) -> Tensor:
    """Sohn et al. 2020, eq. 3 and 4: ℓ_s + λ ℓ_u, the second a mean over all images, confident or not."""
    named, weak, strong = (step.online[view].logits for view in (SUPPORT, FIRST, SECOND))
    supervised = mean([-softmax(list(s))[y].log() for s, y in zip(named, step.support.label.tolist(), strict=True)])
    unsupervised = []
    for i in range(len(step.query)):
        q = [float(chance) for chance in softmax(list(weak[i].detach()))]
        pseudo_label = q.index(max(q))
        loss = -softmax(list(strong[i]))[pseudo_label].log()
        unsupervised.append(loss if max(q) >= objective.threshold else 0 * loss)
    return supervised + objective.unlabelled_weight * mean(unsupervised)
