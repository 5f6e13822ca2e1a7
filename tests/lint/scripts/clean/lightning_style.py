"""A Lightning module: the trainer does precision, clipping and accumulation."""
# ruff: noqa

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, random_split
from torchvision import transforms
from torchvision.datasets import CIFAR10


def block(inputs, outputs, pool=False):
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


class LitResnet(pl.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.conv1, self.conv2 = block(3, 64), block(64, 128, pool=True)
        self.res1 = nn.Sequential(block(128, 128), block(128, 128))
        self.conv3 = block(128, 256, pool=True)
        self.head = nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(256, 10))

    def forward(self, x):
        out = self.conv2(self.conv1(x))
        out = self.res1(out) + out
        return F.log_softmax(self.head(self.conv3(out)), dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.nll_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    pl.seed_everything(7)
    data = CIFAR10("data", train=True, download=True, transform=transforms.ToTensor())
    train, valid = random_split(data, [45000, 5000])
    trainer = pl.Trainer(
        max_epochs=30,
        accelerator="auto",
        precision="16-mixed",
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        callbacks=[LearningRateMonitor(logging_interval="step"), ModelCheckpoint(monitor="val_acc")],
    )
    trainer.fit(LitResnet(), DataLoader(train, 256, shuffle=True, num_workers=4), DataLoader(valid, 256))


if __name__ == "__main__":
    main()
